"""The kernels against plain torch.

On a CUDA GPU, or on a CPU in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py`.
"""

import os

import pytest
import torch
from torch import nn

from dapo_rl.engines.native.slots import SlotState
from dapo_rl.engines.token_sampling import derive_seed, uniforms

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("neither a CUDA GPU nor Triton's interpreter", allow_module_level=True)

from dapo_rl.engines.native import kernels  # noqa: E402
from dapo_rl.models.kernels import decode_ops  # noqa: E402
from dapo_rl.models.kernels.gated_mlp import gated  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter cuts bfloat16 off instead of rounding it, and multiplies its bits as integers.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""Triton's interpreter has no products of bfloat16."""
DTYPES = [torch.float32, HALF]
POISON = float("nan")


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


def rounding(dtype):
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]


def assert_rounds_to(actual, expected, steps=2):
    """Equal but for the last bits of the type: each element within some steps of its own size."""
    assert actual.dtype == expected.dtype
    eps = torch.finfo(actual.dtype).eps if actual.dtype != torch.float32 else 1e-6
    torch.testing.assert_close(actual.double(), expected.double(), rtol=steps * eps, atol=1e-6)


# --- Attention ---


def cached_case(lengths, K, R, D, dtype, capacity=160, page=32, spare=2):
    """Rows in shuffled slots whose pages are shuffled too, and whose unused places are NaN, as slices of joint
    tensors."""
    B, M = len(lengths), capacity // page
    S = B + spare
    table = (1 + torch.randperm(S * M)).view(S, M).int()
    caches = torch.full((2, 1 + S * M, K, page, D), POISON, dtype=dtype)
    slots = torch.randperm(S)[:B]
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        for n in range(length):
            caches[:, table[slot, n // page], :, n % page] = torch.randn(2, K, D).to(dtype)
    qkv = torch.randn(B, (R + 2) * K, D).to(dtype)
    q, k, v = qkv[:, : R * K], qkv[:, R * K : (R + 1) * K], qkv[:, (R + 1) * K :]
    positions = torch.tensor(lengths, dtype=torch.int32)
    return q, k, v, caches[0], caches[1], table, slots, positions


def in_order(cache, table, slot):
    """The keys or values of a slot, `[K, C, D]`."""
    return cache[table[slot].long()].transpose(0, 1).flatten(1, 2)


def attend_row(q_HD, k_KLD, v_KLD, scale):
    repeat = q_HD.shape[0] // k_KLD.shape[0]
    k, v = (x.double().repeat_interleave(repeat, 0) for x in (k_KLD, v_KLD))
    weights = torch.softmax((k @ q_HD.double()[:, :, None]).squeeze(-1) * scale, -1)
    return (weights[:, None] @ v).squeeze(1)


def check_attention(case, splits, dtype, scale=0.3, tolerance=None):
    q, k, v, k_cache, v_cache, table, slots, positions = case
    page = k_cache.shape[2]
    before = k_cache.clone(), v_cache.clone()
    out = kernels.decode_attention(*case, scale, splits)
    assert out.shape == q.shape
    places = list(enumerate(zip(slots.tolist(), positions.tolist(), strict=True)))
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        for b, (slot, position) in places:
            old[table[slot, position // page], :, position % page] = new[b]
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)
    for b, (slot, position) in places:
        keys, values = (in_order(cache, table, slot)[:, : position + 1] for cache in (k_cache, v_cache))
        expected = attend_row(q[b], keys, values, scale)
        most = rounding(dtype) if tolerance is None else tolerance
        torch.testing.assert_close(out[b].double(), expected, rtol=most, atol=most)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("K", "R", "D"), [(2, 1, 16), (3, 3, 64), (1, 4, 80), (2, 7, 128), (1, 20, 96), (1, 2, 256)])
def test_attention_of_ragged_rows(K, R, D, splits, dtype):
    check_attention(cached_case([0, 1, 31, 64, 65, 127, 128, 150, 159], K, R, D, dtype), splits, dtype)


@pytest.mark.parametrize("page", [16, 64, 128])
def test_attention_with_pages_of_any_size(page):
    check_attention(cached_case([0, 15, 16, 63, 64, 200, 255], 2, 3, 64, HALF, capacity=256, page=page), 2, HALF)


def test_rows_that_share_pages_read_the_same_keys():
    case = cached_case([64, 64], 2, 2, 32, HALF)
    table, slots = case[5:7]
    table[slots[1], :2] = table[slots[0], :2]
    check_attention(case, 1, HALF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_large_scores(dtype):
    q, *rest = cached_case([5, 70, 129], 2, 3, 64, dtype)
    # The products of a score are rounded in float32; what a score is off by, its exponential is off by relatively.
    keys, values = (x.float().nan_to_num().abs().reshape(-1, 64) for x in (rest[2], rest[3]))
    products = ((q * 10).float().abs().reshape(-1, 64) @ keys.T).max()
    rounded = torch.finfo(torch.float32).eps / 2 * float(products * values.max())
    check_attention((q * 10, *rest), 2, dtype, scale=1.0, tolerance=max(rounding(dtype), rounded))


def test_attention_over_a_cache_whose_heads_are_innermost():
    q, k, v, k_cache, v_cache, table, slots, positions = cached_case([3, 64, 100], 3, 3, 64, HALF)
    k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
    check_attention((q, k, v, k_cache, v_cache, table, slots.int(), positions.long()), 1, HALF)


def test_a_row_beyond_its_table_writes_nowhere():
    q, k, v, k_cache, v_cache, table, slots, _ = cached_case([32, 32], 1, 1, 16, torch.float32, capacity=32)
    before = k_cache.clone()
    positions = torch.tensor([32, 40], dtype=torch.int32)
    out = kernels.decode_attention(q, k, v, k_cache, v_cache, table, slots, positions, 1.0, 2)
    torch.testing.assert_close(k_cache, before, rtol=0, atol=0, equal_nan=True)
    assert out.isfinite().all()


def test_parts_fill_the_chip_and_rows_alone_are_not_cut():
    assert kernels.splits_for(1024, 3, 132) == 1
    assert kernels.splits_for(88, 3, 132) == 1
    assert kernels.splits_for(32, 3, 132) == 5
    assert kernels.splits_for(1, 1, 132) == 32


# --- Drawing ---


def draw(logits, temperature, keys, generated):
    B = len(logits)
    tokens = torch.full((B,), -1)
    logps = torch.full((B,), POISON, dtype=torch.float32)
    kernels.draw(
        logits, torch.as_tensor(temperature, dtype=torch.float32).expand(B).contiguous(), keys, generated, tokens, logps
    )
    return tokens, logps


def some_keys(count):
    return torch.tensor([derive_seed("a test", torch.randint(2**40, ()).item()) for _ in range(count)])


def inverse_cdf(logits, temperature, keys, generated):
    """In float64; the places of the CDF around the draw too, to see how near a boundary it was."""
    probabilities = torch.softmax(logits.double() / temperature[:, None], -1)
    cdf = probabilities.cumsum(-1)
    target = uniforms(keys, generated)[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True)
    distance = (cdf - target).abs().amin(-1)
    return tokens[:, 0], distance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [7, 1000, 1024, 4097, 20011])
def test_tokens_are_those_of_the_inverse_cdf(V, dtype):
    B = 48
    logits = (torch.randn(B, V + 5) * 4).to(dtype)[:, :V]
    temperature = torch.rand(B) * 2 + 0.1
    keys, generated = some_keys(B), torch.randint(0, 5000, (B,), dtype=torch.int32)
    tokens, logps = draw(logits, temperature, keys, generated)
    expected, distance = inverse_cdf(logits, temperature, keys, generated)
    clear = distance > 3e-6
    assert clear.sum() > B // 2
    assert torch.equal(tokens[clear], expected[clear])
    reference = torch.log_softmax(logits.double() / temperature[:, None], -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), reference, rtol=1e-5, atol=1e-5)


def test_random_numbers_are_bit_for_bit_those_of_draw():
    """Of equal masses, 2ⁿ in number, a token is the n upper bits of its random number."""
    B, chunks = (64, 16) if INTERPRETED else (4096, 256)
    keys, generated = some_keys(B), torch.randint(0, 2**31 - 1, (B,), dtype=torch.int32)
    keys[:4] = torch.tensor([0, 1, 2**63 - 1, -(2**63)])
    generated[:2] = torch.tensor([0, 2**31 - 2])
    u = uniforms(keys, generated)
    tokens, _ = draw(torch.zeros(B, 1024), 1.0, keys, generated)
    assert torch.equal(tokens, (u * 1024).long())
    tokens, _ = draw(torch.zeros(B, 1024 * chunks), 1.0, keys, generated)
    assert torch.equal(tokens, (u * 1024 * chunks).long())


def keys_of(z_values, generated):
    """Keys whose random number at a position has these 64 bits: splitmix64 backwards."""
    mask = 2**64 - 1

    def unshift(z, bits):
        x = z
        for _ in range(64 // bits + 1):
            x = z ^ (x >> bits)
        return x

    keys = []
    for z in z_values:
        z = unshift(z, 31)
        z = unshift((z * pow(0x94D049BB133111EB, -1, 2**64)) & mask, 27)
        z = unshift((z * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & mask, 30)
        key = (z - (generated + 1) * 0x9E3779B97F4A7C15) & mask
        keys.append(key - 2**64 if key >= 2**63 else key)
    return torch.tensor(keys)


def test_the_ends_of_the_unit_interval():
    keys = keys_of([0, 2**11 - 1, 2**64 - 1, 2**64 - 2**11], generated=17)
    generated = torch.full((4,), 17, dtype=torch.int32)
    assert uniforms(keys, generated).tolist() == [0, 0, 1 - 2**-53, 1 - 2**-53]
    logits = torch.full((4, 9000), -torch.inf)
    logits[:, 4100:4700] = torch.randn(600)
    tokens, logps = draw(logits, 1.0, keys, generated)
    assert tokens.tolist() == [4100, 4100, 4699, 4699]
    assert logps.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_without_mass_is_never_drawn(dtype):
    B, V = 64, 12300
    logits = torch.full((B, V), -torch.inf)
    allowed = torch.rand(B, V) < 3 / V
    allowed[torch.arange(B), torch.randint(V, (B,))] = True
    logits = torch.where(allowed, torch.randn(B, V), logits).to(dtype)
    ends = torch.arange(B) % 2 * (2**64 - 1)
    for keys in (some_keys(B), keys_of([0 if e == 0 else 2**64 - 1 for e in ends.tolist()], 3)):
        tokens, logps = draw(logits, 0.7, keys, torch.full((B,), 3, dtype=torch.int32))
        assert allowed[torch.arange(B), tokens].all()
        reference = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logps.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 1e4, 1e30])
def test_extreme_logits(scale):
    B, V = 16, 5000
    logits = torch.randn(B, V) * scale
    keys, generated = some_keys(B), torch.arange(B, dtype=torch.int32)
    tokens, logps = draw(logits, 1.0, keys, generated)
    if scale == 1e30:  # the largest logit has all the probability
        assert torch.equal(tokens, logits.argmax(-1))
        assert (logps == 0).all()
    reference = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("broken", [POISON, torch.inf, -torch.inf])
def test_broken_logits_still_give_a_token_of_the_vocabulary(broken):
    logits = torch.full((4, 5000), broken)
    logits[1, :4990] = 0.0
    logits[2, 10:] = 0.0
    for temperature in (0.0, 1.0):
        tokens, _ = draw(logits, temperature, some_keys(4), torch.zeros(4, dtype=torch.int32))
        assert ((tokens >= 0) & (tokens < 5000)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_rows_among_others(dtype):
    B, V = 32, 9001
    logits = torch.randn(B, V).to(dtype)
    top = logits.amax(-1) + 1
    ties = torch.randint(0, V, (B, 3)).sort(-1).values
    logits.scatter_(-1, ties, top[:, None].expand(B, 3))
    temperature = torch.where(torch.arange(B) % 2 == 0, 0.0, 0.8)
    tokens, logps = draw(logits, temperature, some_keys(B), torch.zeros(B, dtype=torch.int32))
    greedy = temperature == 0
    assert torch.equal(tokens[greedy], ties[greedy, 0])
    reference = torch.log_softmax(logits.double() / torch.where(greedy, 1.0, temperature)[:, None].double(), -1)
    reference = reference.gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), reference, rtol=1e-5, atol=1e-5)


def test_frequencies_are_the_softmax():
    draws, V = (600, 4200) if INTERPRETED else (200_000, 5000)
    logits = torch.full((V,), -torch.inf)
    places = torch.tensor([0, 1, 4000, 4095, 4096, V - 1])
    logits[places] = torch.randn(6) / 2
    counts = torch.zeros(V)
    for start in range(0, draws, 50_000):
        rows = min(50_000, draws - start)
        generated = torch.arange(start, start + rows, dtype=torch.int32)
        tokens, _ = draw(logits.expand(rows, V).contiguous(), 0.9, some_keys(1).expand(rows).contiguous(), generated)
        counts += torch.bincount(tokens, minlength=V)
    expected = torch.softmax(logits / 0.9, -1) * draws
    chi_squared = ((counts - expected)[places] ** 2 / expected[places]).sum().item()
    assert counts[places].sum() == draws
    assert chi_squared < 30  # five degrees of freedom: beyond it once in 10⁵ times


# --- Advancing ---


def some_state(S, M):
    state = SlotState.empty(S, M, DEVICE)
    state.last_token.random_(0, 100)
    state.position.random_(0, 50)
    state.generated.random_(0, M)
    state.limit.random_(1, M + 1)
    state.done.copy_(torch.rand(S) < 0.3)
    state.heeds_stop.copy_(torch.rand(S) < 0.5)
    state.key.copy_(some_keys(S))
    state.temperature.copy_(torch.rand(S) + 0.1)
    state.tokens.fill_(-1)
    state.logps.fill_(POISON)
    return state


def clone(state):
    return SlotState(**{name: getattr(state, name).clone() for name in SlotState.__slots__})


def advance_by_hand(state, slots, tokens, logps, is_stop, cached):
    for slot, token, logp in zip(slots.tolist(), tokens.tolist(), logps.tolist(), strict=True):
        if state.done[slot]:
            continue
        count = state.generated[slot].item()
        state.tokens[slot, count] = token
        state.logps[slot, count] = logp
        state.generated[slot] += 1
        state.position[slot] += cached
        state.last_token[slot] = token
        state.done[slot] = (is_stop[token] & state.heeds_stop[slot]) | (count + 1 >= state.limit[slot])


def assert_same_state(actual, expected):
    for name in SlotState.__slots__:
        a, b = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("cached", [0, 1])
def test_advance(cached):
    state = some_state(300, 12)
    slots = torch.randperm(300)[:200]
    tokens, logps = torch.randint(0, 64, (200,)), torch.randn(200)
    is_stop = torch.rand(64) < 0.3
    expected = clone(state)
    kernels.advance(tokens, logps, slots, state, is_stop, cached)
    advance_by_hand(expected, slots, tokens, logps, is_stop, cached)
    assert_same_state(state, expected)


def test_a_finished_slot_may_fill_up_a_batch():
    state = some_state(5, 4)
    state.done[3] = True
    expected = clone(state)
    slots = torch.full((150,), 3)
    kernels.advance(torch.zeros(150, dtype=torch.int64), torch.zeros(150), slots, state, torch.ones(8).bool())
    kernels.draw_and_advance(torch.randn(150, 70), slots, state, torch.ones(70).bool())
    assert_same_state(state, expected)


@pytest.mark.parametrize("cached", [0, 1])
def test_drawing_and_advancing_at_once(cached):
    S, B, V = 40, 24, 6000
    state = some_state(S, 9)
    state.temperature[::3] = 0
    slots = torch.randperm(S)[:B]
    logits = (torch.randn(B, V) * 3).to(HALF)
    is_stop = torch.rand(V) < 0.3
    expected = clone(state)
    tokens, logps = draw(logits, state.temperature[slots], state.key[slots], state.generated[slots])
    advance_by_hand(expected, slots, tokens, logps, is_stop, cached)
    got_tokens, got_logps = kernels.draw_and_advance(logits, slots, state, is_stop, cached)
    assert torch.equal(got_tokens, tokens)
    assert torch.equal(got_logps, logps)
    assert_same_state(state, expected)


# --- Between matrix products ---


def llama_norm(x, weight, eps):
    x_32 = x.float()
    return weight * (x_32 * torch.rsqrt(x_32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma_norm(x, weight, eps):
    x_32 = x.float()
    return (x_32 * torch.rsqrt(x_32.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(64,), (5, 48), (1, 7, 576), (1, 3, 1500), (2, 3, 9, 64)])
def test_rms_norm(shape, plus_one, dtype):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    norm = gemma_norm if plus_one else llama_norm
    assert_rounds_to(decode_ops.rms_norm(x, weight, 1e-5, plus_one), norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_joint_projection(dtype):
    joint = torch.randn(1, 11, (5 + 2) * 80).to(dtype)
    heads = joint[..., 80 : 80 + 5 * 80].view(1, 11, 5, 80)
    weight = torch.randn(80).to(dtype)
    for x in (heads, heads.transpose(1, 2), joint[..., :80], joint[0, :, :80]):
        assert_rounds_to(decode_ops.rms_norm(x, weight, 1e-6, False), llama_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
def test_add_rms_norm(plus_one, dtype):
    x, residual = torch.randn(2, 1, 13, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    normed, total = decode_ops.add_rms_norm(x, residual, weight, 1e-5, plus_one)
    assert torch.equal(total, residual + x)
    norm = gemma_norm if plus_one else llama_norm
    assert_rounds_to(normed, norm(residual + x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 6, 2 * 1536), (4, 2 * 100), (1, 1, 2 * 1025)])
def test_gated(shape, kind, dtype):
    gate_up = (torch.randn(shape) * 5).to(dtype)
    gate_up.view(-1)[:4] = torch.tensor([200.0, -200.0, 0.0, -90.0])
    gate, up = gate_up.chunk(2, -1)
    exact = gate.double()
    act = nn.functional.silu(exact) if kind == "silu" else nn.functional.gelu(exact, approximate="tanh")
    assert_rounds_to(gated(gate_up, kind), act.to(dtype) * up)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "inner", "N"), [(1, 64, 128), (5, 100, 96), (16, 200, 64), (17, 64, 200), (32, 96, 48)]
)
def test_the_gated_product_of_few_rows(rows, inner, N, kind):
    x, weight = torch.randn(1, rows, N).to(HALF), (torch.randn(2 * inner, N) / N**0.5).to(HALF)
    # What rounds the other way in the product of the gate moves the result by more than one rounding.
    assert_close_to(decode_ops.gated_linear(x, weight, None, kind), x, weight, kind)


def test_the_gated_product_of_more_rows_or_with_a_bias():
    x, weight, bias = torch.randn(40, 64).to(HALF), torch.randn(96, 64).to(HALF) / 8, torch.randn(96).to(HALF)
    assert_close_to(decode_ops.gated_linear(x, weight, None, "silu"), x, weight, "silu")
    assert_close_to(decode_ops.gated_linear(x[:4], weight, bias, "silu"), x[:4], weight, "silu", bias)


def assert_close_to(got, x, weight, kind, bias=None):
    bias = None if bias is None else bias.double()
    gate, up = nn.functional.linear(x.double(), weight.double(), bias).chunk(2, -1)
    act = nn.functional.silu(gate) if kind == "silu" else nn.functional.gelu(gate, approximate="tanh")
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(got.double(), act * up, rtol=4 * eps, atol=4 * eps)


def rotate_half(x):
    x_1, x_2 = x.chunk(2, -1)
    return torch.cat([-x_2, x_1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "K", "D", "W"), [(9, 3, 64, 64), (4, 4, 16, 16), (5, 1, 80, 80), (6, 2, 96, 72)])
def test_rotary(H, K, D, W, dtype):
    T = 7
    qkv = torch.randn(1, T, (H + 2 * K) * D).to(dtype)
    q = qkv[..., : H * D].view(1, T, H, D).transpose(1, 2)
    k = qkv[..., H * D : (H + K) * D].view(1, T, K, D).transpose(1, 2)
    angles = torch.rand(1, T, W) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for x, got in zip((q, k), decode_ops.rotary(q, k, cos, sin), strict=True):
        turned = x[..., :W] * cos[:, None] + rotate_half(x[..., :W]) * sin[:, None]
        # Two products that nearly cancel keep the rounding of each.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got[..., :W].double(), turned.double(), rtol=2 * eps, atol=4 * eps)
        torch.testing.assert_close(got[..., W:], x[..., W:], rtol=0, atol=0)
        assert got.transpose(1, 2).is_contiguous()
