"""What layers compute, in a few dumb lines of NumPy at float64: no cut, no mesh."""

import math

import numpy as np


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale


def layer_norm(x, scale, bias, eps):
    centered = x - np.mean(x, -1, keepdims=True)
    return centered / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps) * scale + bias


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def frequencies(width, theta):
    """Of each pair of dims, in radians per position (Su et al. 2021, section 3.2.2)."""
    return np.array([theta ** (-2 * pair / width) for pair in range(width // 2)])


def rotated(x_BSHP, positions_BS, frequencies):
    """Each pair (i, i + width/2) as a complex number, turned by position * frequency."""
    left, right = np.split(np.asarray(x_BSHP, np.float64), 2, -1)
    turned = (left + 1j * right) * np.exp(1j * positions_BS[:, :, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], -1)


def yarn_frequencies(width, theta, factor, original_seq):
    """As the authors' code does it: a ramp from the dim of 32 turns in the original context to that of one turn."""
    dim_of = lambda turns: width * math.log(original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))  # noqa: E731
    first, last = max(math.floor(dim_of(32)), 0), min(math.ceil(dim_of(1)), width - 1)
    result = []
    for pair, frequency in enumerate(frequencies(width, theta)):
        ramp = min(max((pair - first) / max(last - first, 0.001), 0), 1)
        result.append((1 - ramp) * frequency + ramp * frequency / factor)
    return np.array(result)


def llama3_frequencies(width, theta, factor, original_seq, slow_turns, fast_turns):
    """As the authors' code does it, by the length of each wave in positions."""
    result = []
    for frequency in frequencies(width, theta):
        wave = 2 * math.pi / frequency
        if wave < original_seq / fast_turns:
            result.append(frequency)
        elif wave > original_seq / slow_turns:
            result.append(frequency / factor)
        else:
            smooth = (original_seq / wave - slow_turns) / (fast_turns - slow_turns)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(result)


def attention(q_BSHJ, k_BTGJ, v_BTGK, segments_BS, scale):
    """One softmax for each row, head and query; query head h reads key head h // (H / G)."""
    out = np.zeros((*q_BSHJ.shape[:3], v_BTGK.shape[-1]))
    group = q_BSHJ.shape[2] // k_BTGJ.shape[2]
    for row, query, head in np.ndindex(*q_BSHJ.shape[:3]):
        seen = [t for t in range(query + 1) if segments_BS[row, t] == segments_BS[row, query]]
        scores = scale * k_BTGJ[row, seen, head // group] @ q_BSHJ[row, query, head]
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights / weights.sum() @ v_BTGK[row, seen, head // group]
    return out


def gqa(params, x, positions, segments, angles, temperature=1.0):
    """Grouped-query attention; `params` as the layer names them, `angles` the frequencies."""
    q, k, v = (project(x, params[name]) for name in "qkv")
    if "q_norm" in params:
        q, k = rms_norm(q, params["q_norm"]["scale"], 1e-6), rms_norm(k, params["k_norm"]["scale"], 1e-6)
    q, k = rotated(q, positions, angles), rotated(k, positions, angles)
    seen = attention(q, k, v, segments, temperature / math.sqrt(q.shape[-1]))
    return np.einsum("BSHK,HKD->BSD", seen, params["out"]["kernel"])


def mla(params, x, positions, segments, angles, eps, temperature=1.0):
    """DeepSeek-V2, equations 9 to 19: every head's keys and values written out."""
    query = x
    if "queries_1" in params:
        query = rms_norm(x @ params["queries_0"]["kernel"], params["queries_1"]["scale"], eps)
    last = max(name for name in params if name.startswith("queries"))
    q = project(query, params[last])
    latent = rms_norm(x @ params["down"]["kernel"], params["norm"]["scale"], eps)
    k, v = project(latent, params["up_k"]), project(latent, params["up_v"])
    width = k.shape[-1]
    k_rope = rotated((x @ params["k_rope"]["kernel"])[:, :, None], positions, angles)
    q = np.concatenate([q[..., :width], rotated(q[..., width:], positions, angles)], -1)
    k = np.concatenate([k, np.broadcast_to(k_rope, (*k.shape[:3], k_rope.shape[-1]))], -1)
    seen = attention(q, k, v, segments, temperature / math.sqrt(q.shape[-1]))
    return np.einsum("BSHK,HKD->BSD", seen, params["out"]["kernel"])


def project(x, params):
    """To heads, with the bias if there is one."""
    return np.einsum("BSD,DHK->BSHK", x, params["kernel"]) + params.get("bias", 0)


def cross_entropy(logits, labels, z_coefficient):
    """Sum over the labels that are not -1."""
    total = 0.0
    for row, label in zip(logits, labels):
        if label != -1:
            logsumexp = np.log(np.sum(np.exp(row - row.max()))) + row.max()
            total += logsumexp - row[label] + z_coefficient * logsumexp**2
    return total
