"""What a layout takes at least, in microseconds of thought: a sweep passes over layouts that cannot be among the best.

Never more than what `analytic` finds, as a test holds; far less where that is not known without a trace.
"""

from typing import NamedTuple

import jax.numpy as jnp

from parallax.analysis.budget import FLOPS_PER_WEIGHT, flops_per_token, parameters_by_component
from parallax.analysis.plan.analytic import hidden_secs, lockstep_bubble
from parallax.analysis.plan.layouts import Choice
from parallax.analysis.report.place import Place
from parallax.config.settings import Settings
from parallax.pipeline.sharded_model import ShardedModel
from parallax.schedules import by_name, figures

PARAMETER_BYTES = 4  # float32
SCORES_MOVED = 6  # of the six products of attention, forward and backward, each reads or writes all scores
DOWN = 1 / 3  # of a gated MLP's parameters: its result is no input of anything in the layer, so it is never made again


class Bound(NamedTuple):
    """What a layout takes at least."""

    secs: float
    peak_bytes: float


class Bounds:
    """Bounds of one model on one place."""

    def __init__(self, settings: Settings, place: Place, model: ShardedModel):
        """`model` is the model on any mesh: its global shapes are the same on all."""
        self.settings, self.place = settings, place
        self.tokens = settings.data.global_batch * settings.data.seq
        self.parameters = parameters_by_component(model.shapes)
        self.flops = flops_per_token(settings.model, model.shapes, seq=settings.data.seq)

    def of(self, choice: Choice) -> Bound:
        """The bound of a layout, legal or not."""
        return Bound(self._secs(choice), self._bytes(choice))

    def _secs(self, choice: Choice) -> float:
        settings = choice.applied(self.settings)
        bubble = 0.0 if self.place.shared else lockstep_bubble(settings)
        work = self._work_secs(choice)
        return work / (1 - bubble) + self._exposed_secs(choice, work) + self._residual_secs(settings)

    def _work_secs(self, choice: Choice) -> float:
        model, tokens = self.settings.model, self.tokens / self.place.devices
        rate, bandwidth = self.place.matmul_rate(model.dtype), self.place.chip.hbm_bandwidth
        flops = self.flops - self._attention_flops + 2 * self._made_again(choice)
        scores = SCORES_MOVED * self._itemsize * model.layers * model.heads * self.settings.data.seq
        attention = self._attention_flops / rate
        if model.kernel == "xla":  # all scores are computed, and pass through memory
            attention = max(2 * attention, scores / bandwidth)
        kept = 2 * self._width_kept(choice.remat) * model.layers * self._itemsize / bandwidth
        return tokens * (flops / rate + attention + kept)

    @property
    def _attention_flops(self) -> int:
        """Of the model's for each token, those of attention's two products, forward and backward."""
        kernels = self._layers + self.settings.model.vocab * self.settings.model.d_model
        return self.flops - FLOPS_PER_WEIGHT * kernels

    def _made_again(self, choice: Choice) -> float:
        """Parameters of the products that are run once more for each token if layers are recomputed."""
        mlp = {"attention": 0.0, "layer": 1 - DOWN, "stage": 1 - DOWN}
        if choice.remat not in mlp:
            return 0.0
        return self.parameters["attention"] + mlp[choice.remat] * self.parameters["mlp"]

    def _exposed_secs(self, choice: Choice, work: float) -> float:
        """Of the layers' gathers over dp and sums of gradients, in the compute dtype or wider, what at least shows:
        all of what is sent once a step, else what does not hide behind the work."""
        sizes = {"pp": choice.pp, "dp": choice.dp, "tp": choice.tp}
        share = (choice.dp - 1) / choice.dp * self._layers / (choice.pp * choice.tp)
        once = share * self._itemsize / self.place.bandwidth(sizes, ["dp"])
        if choice.gather != "microbatch":
            return 2 * once
        gathers, sums = 2 * choice.microbatches * once, choice.microbatches * once
        if choice.prefetch or self.settings.fsdp.reduce == "compute":
            gathers, sums = gathers + sums, 0.0  # all of it can hide
        return gathers - hidden_secs(work, gathers) + sums

    def _residual_secs(self, settings: Settings) -> float:
        """Columns then rows: a layer's two branches gather their inputs and scatter their outputs, forward and back."""
        sizes, model = settings.mesh.sizes, settings.model
        if sizes["tp"] == 1 or settings.layout.tensor_parallel != "column_row":
            return 0.0
        share = (sizes["tp"] - 1) / sizes["tp"]
        tokens = self.tokens / sizes["dp"] * model.layers / sizes["pp"]
        sent = 8 * share * tokens * model.d_model * self._itemsize
        return sent / self.place.bandwidth(sizes, ["tp"])

    def _bytes(self, choice: Choice) -> float:
        """Parameters and gradients, cut as far as can be; whole layers if gathered once; what no pass makes again."""
        ranks = choice.pp * choice.tp
        gathered = self._layers / ranks * (self._itemsize + PARAMETER_BYTES) * (choice.gather != "microbatch")
        state = 2 * PARAMETER_BYTES * self._layers / self.place.devices
        return max(state, state / 2 + gathered) + self._kept_bytes(choice)

    def _kept_bytes(self, choice: Choice) -> float:
        """Without recomputation, what a layer's products read, in each microbatch that a rank holds at once."""
        if choice.remat != "none":
            return 0.0
        tokens = self.tokens / choice.dp / choice.microbatches
        held = 1.0
        if choice.pp > 1:
            schedule = by_name(choice.schedule, choice.pp, choice.microbatches, choice.virtual)
            held = max(figures(schedule).activations)
        layers = self.settings.model.layers / choice.pp
        return held * tokens * self._width_kept("none") / choice.tp * layers * self._itemsize

    def _width_kept(self, remat: str) -> int:
        """Entries of a token and layer that are kept at least: the layer's input; gate and up; q and what attention
        reads of the residual stream; the weights of attention."""
        model = self.settings.model
        gate_and_up, queries = 2 * model.d_ff, model.heads * model.d_head
        if remat == "stage":
            return 0
        if remat == "layer":
            return model.d_model
        if remat == "attention":
            return model.d_model + gate_and_up
        if remat == "elementwise":
            return model.d_model + gate_and_up + queries
        scores = (model.kernel == "xla") * model.heads * self.settings.data.seq
        return 2 * model.d_model + gate_and_up + queries + scores

    @property
    def _layers(self) -> int:
        return self.parameters["attention"] + self.parameters["mlp"]

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.settings.model.dtype).itemsize
