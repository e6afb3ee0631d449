"""What a block can say besides its widths: each choice, and pairs of them, is the same on every mesh."""

import pytest
from support.tiny_model import HIDDEN_CUT
from test_parity import check_parity

CHOICES = {
    "one plus": dict(norm_scale="one_plus"),
    "layer": dict(norm="layer", norm_bias=True),
    "layer, no parameters": dict(norm="layer", norm_scale="none"),
}
CUT = dict(mesh=(2, 2, 2), attention="gqa", embedding="vocab_parallel", microbatches=4, tied=True)
CUT |= dict(tensor_parallel="column_row", residual=HIDDEN_CUT, schedule="one_f_one_b", remat="elementwise")


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_the_same_on_a_mesh(name, record_property):
    check_parity(CUT | CHOICES[name], record_property)
