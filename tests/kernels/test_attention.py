"""`paged_attention` against float64 attention over keys and values gathered one query at a time."""

import pytest
import torch

from _aot import TARGETS, record_launches
from _attention_batches import check, exact_attention, new_batch, torch_attention
from _compare import assert_close_to_float64
from conftest import INTERPRET
from tridraft.kernels._op import Arch, arch_of
from tridraft.kernels.attention import (
    FP8,
    SPLIT_QUERIES,
    combine_config,
    paged_attention,
    prefill_config,
    shared_memory,
    split_config,
)

DTYPES = [torch.float16, torch.float32] if INTERPRET else [torch.bfloat16, torch.float16, torch.float32]
"""The interpreter multiplies bfloat16 bits as integers, so bfloat16 kernels are tested on the GPU only."""

SHORT = [(1, 37), (0, 0), (5, 70), (3, 3), (1, 0), (1, 1), (0, 9)]
"""(query_len, seq_len) of decode, verification, padding and empty requests in one batch."""

MIXED = [(20, 45), (1, 50), (0, 0), (33, 33), (16, 18)]
"""(query_len, seq_len) of prefill, prefill behind earlier keys, and decode in one batch."""


def gpu_only(*values):
    """A parameter set too slow for the interpreter."""
    return pytest.param(*values, marks=pytest.mark.gpu if INTERPRET else ())


SHAPES = [
    gpu_only(64, 3, 3, torch.float32),
    (96, 4, 2, torch.float16),
    gpu_only(128, 10, 2, torch.float16),
    gpu_only(192, 8, 1, torch.float16),
    gpu_only(256, 16, 1, torch.float16),
    gpu_only(256, 8, 4, torch.float32),
    (512, 8, 1, torch.float16),
    gpu_only(512, 32, 1, torch.float16),
    gpu_only(512, 64, 2, torch.float32),
    gpu_only(16, 2, 1, torch.float16),
]
"""(head_dim, query heads, key-value heads, dtype); bfloat16 replaces float16 where it can be multiplied."""


@pytest.mark.parametrize("lengths", [SHORT, MIXED], ids=["short", "mixed"])
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads", "dtype"), SHAPES)
def test_matches_float64(head_dim, num_heads, num_kv_heads, dtype, lengths, impl, device):
    dtype = torch.bfloat16 if dtype == torch.float16 and not INTERPRET else dtype
    batch = new_batch(
        lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
    check(batch, impl)


@pytest.mark.parametrize("num_heads", [gpu_only(1), gpu_only(2), 7, gpu_only(32)])
def test_group_sizes(num_heads, impl, device):
    check(new_batch(SHORT, num_heads=num_heads, num_kv_heads=1, head_dim=32, device=device), impl)


@pytest.mark.parametrize("window", [gpu_only(1), gpu_only(15), 16, 17, gpu_only(33)])
@pytest.mark.parametrize("lengths", [[(1, 16), (1, 17), (1, 15), (4, 34), (6, 3 + 6)], [(20, 60), (18, 18)]])
def test_sliding_window(window, lengths, impl, device):
    """Keys before the window are NaN and their blocks do not exist."""
    check(new_batch(lengths, head_dim=32, window=window, device=device), impl, window=window)


@pytest.mark.parametrize("window", [gpu_only(1024), 512])
def test_window_of_a_long_sequence(window, impl, device):
    lengths = [(1, 1400), (3, window), (2, window + 1), (1, window - 1)]
    check(
        new_batch(lengths, num_heads=2, num_kv_heads=1, head_dim=16, window=window, device=device), impl, window=window
    )


@pytest.mark.parametrize(("key", "expected"), [(903, 0.0), (904, 1 / 4096), (4999, 1 / 4096)])
def test_window_edge_of_gemma(key, expected, impl, device):
    """C20: with 4,096 keys, the query at 4999 sees 904 … 4999."""
    batch = new_batch([(1, 5000)], num_heads=1, num_kv_heads=1, head_dim=16, block_size=64, device=device)
    batch.q.zero_()
    batch.v_cache.zero_()
    batch.v_cache[int(batch.block_table[0, key // 64]), key % 64] = 1
    out = paged_attention(*batch.tensors, scale=1.0, max_query_len=1, sliding_window=4096, impl=impl)
    torch.testing.assert_close(out, torch.full_like(out, expected), atol=0, rtol=1e-5)


@pytest.mark.parametrize("lengths", [SHORT, MIXED], ids=["short", "mixed"])
def test_softcap(lengths, impl, device):
    batch = new_batch(lengths, head_dim=64, window=40, device=device)
    check(batch, impl, softcap=5.0, window=40, scale=2.0)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("lengths", [SHORT, MIXED], ids=["short", "mixed"])
def test_fp8_scales(lengths, per_head, impl, device):
    """C21: the scales are read from the device at each call, so loading them late is enough."""
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    batch = new_batch(lengths, head_dim=64, dtype=dtype, kv_dtype=FP8, device=device)
    k_scale, v_scale = (torch.ones(2 if per_head else 1, device=device) for _ in range(2))
    check(batch, impl, k_scale=k_scale, v_scale=v_scale, scale=0.01)
    k_scale.copy_(torch.tensor([0.003, 0.1])[: len(k_scale)])
    v_scale.copy_(torch.tensor([0.02, 0.5])[: len(v_scale)])
    check(batch, impl, k_scale=k_scale, v_scale=v_scale, scale=5.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [1, gpu_only(20)])
def test_fp8_holds_every_value(query_len, dtype, impl, device):
    """All 254 numbers of float8_e4m3fn, subnormals and −0 included, arrive as they are, as values and as keys."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[(numbers & 0x7F) == 0x7F] = 0
    cache = numbers.to(device).view(FP8).view(4, 1, 1, 64)
    starts = query_len * torch.arange(5, dtype=torch.int32, device=device)
    options = {"scale": 1.0, "max_query_len": query_len, "impl": impl}
    table = torch.arange(4, dtype=torch.int32, device=device)[:, None]
    rest = (table, starts, torch.ones(4, dtype=torch.int32, device=device))
    zeros = torch.zeros(4 * query_len, 1, 64, device=device, dtype=dtype)
    out = paged_attention(zeros, torch.zeros_like(cache), cache, *rest, **options)
    assert torch.equal(out[query_len - 1 :: query_len], cache[:, 0].to(dtype))
    # One-hot queries pick the numbers of a key one by one; its weight beside a key of zeros tells which they were.
    keys = torch.cat((cache, torch.zeros_like(cache)), 1)
    values = torch.cat((torch.ones(4, 1, 1, 64), torch.zeros(4, 1, 1, 64)), 1).to(device, FP8)
    for column in range(64):
        queries = torch.zeros(4, 1, 64, device=device, dtype=dtype)
        queries[:, :, column] = 1
        rest = (table, torch.arange(5, dtype=torch.int32, device=device), 2 * torch.ones_like(table[:, 0]))
        out = paged_attention(queries, keys, values, *rest, scale=1 / 64, max_query_len=1, impl=impl)
        expected = torch.sigmoid(cache[:, 0, 0, column].double() / 64)
        torch.testing.assert_close(out[:, 0, 3].double(), expected, atol=0, rtol=2**-7)


@pytest.mark.parametrize("layout", ["apart", "packed", "odd"])
@pytest.mark.parametrize("lengths", [SHORT, MIXED], ids=["short", "mixed"])
def test_fp8_layouts(lengths, layout, impl, device):
    """Caches at odd places cannot be loaded in pairs."""
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    batch = new_batch(
        lengths, head_dim=32, dtype=dtype, kv_dtype=FP8, layout="apart" if layout == "odd" else layout, device=device
    )
    if layout == "odd":
        k_cache, v_cache = batch.k_cache, batch.v_cache
        memory = torch.zeros(2, *k_cache.shape[:3], 33, device=device).to(FP8)[..., 1:]
        batch.k_cache, batch.v_cache = memory[0].copy_(k_cache), memory[1].copy_(v_cache)
    check(batch, impl, window=20)


@pytest.mark.parametrize("query_len", [1, 8, 20])
@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.gpu
def test_fp8_tiles(head_dim, query_len, device):
    """Every kind of tile that converts: decode, verification and prefill, one block and several in a tile."""
    for block_size in (16, 64):
        lengths = [(query_len, 150), (query_len, query_len)]
        batch = new_batch(
            lengths, num_heads=8, num_kv_heads=1, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16,
            kv_dtype=FP8, device=device,
        )  # fmt: skip
        check(batch, "triton", k_scale=torch.full((1,), 0.5, device=device))


@pytest.mark.parametrize("layout", ["apart", "block_pairs", "head_major", "packed"])
@pytest.mark.parametrize("block_size", [1, 3, 8, gpu_only(16), gpu_only(48), 64, gpu_only(128)])
def test_cache_layouts(layout, block_size, impl, device):
    """A token pool is block size 1; the other layouts are views of vLLM's caches."""
    batch = new_batch([(2, 37), (1, 5), (1, 20)], head_dim=32, block_size=block_size, layout=layout, device=device)
    assert layout == "apart" or not batch.k_cache.is_contiguous()
    check(batch, impl)


def test_strided_queries_and_output(impl, device):
    batch = new_batch(SHORT, head_dim=32, device=device)
    expected = check(batch, impl)
    qkv = torch.randn(len(batch.q), 8, 48, device=device)
    qkv[:, ::2, :32] = batch.q
    batch.q = qkv[:, ::2, :32]
    wide = torch.full((len(batch.q), 5, 40), 7.0, device=device)
    out = paged_attention(*batch.tensors, scale=32**-0.5, max_query_len=5, out=wide[:, 1:, :32], impl=impl)
    assert torch.equal(out, expected)
    assert (wide[:, 0] == 7).all()
    assert (wide[:, :, 32:] == 7).all()


def test_rows_of_no_request_are_not_touched(impl, device):
    batch = new_batch([(1, 9), (2, 12), (0, 0), (0, 0)], head_dim=32, device=device)
    rows = torch.cat((batch.q, torch.full((4, *batch.q.shape[1:]), float("nan"), device=device)))
    out = torch.full_like(rows, 7)
    expected = check(batch, impl)
    batch.q = rows
    paged_attention(*batch.tensors, scale=32**-0.5, max_query_len=2, out=out, impl=impl)
    assert torch.equal(out[:3], expected)
    assert impl == "eager" or (out[3:] == 7).all()


def test_queries_that_see_nothing_give_zeros(impl, device):
    batch = new_batch([(1, 0), (3, 0), (20, 0), (1, 4)], head_dim=32, device=device)
    out = check(batch, impl)
    assert not out[:24].any()
    assert out[24].any()


def test_a_batch_of_nothing(impl, device):
    batch = new_batch([(0, 0), (0, 0)], head_dim=32, device=device)
    assert paged_attention(*batch.tensors, scale=1.0, max_query_len=1, impl=impl).shape == (0, 4, 32)
    empty = [t[:0] for t in batch.tensors[3:]]
    empty[1] = batch.query_start_loc[:1]
    out = paged_attention(batch.q, batch.k_cache, batch.v_cache, *empty, scale=1.0, max_query_len=1, impl=impl)
    assert out.shape == (0, 4, 32)


def test_groups_use_their_own_block_table(impl, device):
    """C19: the sliding table is [3, 1], the full one [0, 2]; values are the block's number."""
    numbers = torch.arange(4.0, device=device).view(4, 1, 1, 1).repeat(1, 4, 1, 16)
    rest = (torch.tensor([0, 1], device=device).int(), torch.tensor([8], device=device).int())
    means = []
    for table, window in (([[3, 1]], 6), ([[0, 2]], None)):
        out = paged_attention(
            torch.ones(1, 1, 16, device=device),
            torch.zeros_like(numbers),
            numbers,
            torch.tensor(table, dtype=torch.int32, device=device),
            *rest,
            scale=1.0,
            max_query_len=1,
            sliding_window=window,
            impl=impl,
        )
        means.append(out[0, 0, 0].item())
    assert means == pytest.approx([(2 * 3 + 4 * 1) / 6, 1.0])


@pytest.mark.parametrize("query_len", [*map(gpu_only, (1, 2, 3, 4, 5)), 6, *map(gpu_only, (7, 8, 16))])
def test_verify_lengths_at_head_512(query_len, impl, device):
    """C24: some kernels fail from 5 or 6 query rows at head 512 on."""
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    lengths = [(query_len, 40), (query_len, query_len)]
    check(new_batch(lengths, num_heads=4, num_kv_heads=1, head_dim=512, dtype=dtype, device=device), impl)


def test_one_long_request_among_many_short_ones(impl, device):
    """More requests than are looked at together; the long one gets most of the parts, some short ones several."""
    lengths = [(1, 1 + r % 20) for r in range(37 if INTERPRET else 126)] + [(2, 900), (1, 300), (0, 0), (1, 7)]
    batch = new_batch(lengths, num_heads=1, num_kv_heads=1, head_dim=16, device=device)
    check(batch, impl)


@pytest.mark.parametrize("num_sms", [1, 3, gpu_only(132)])
def test_any_number_of_parts(num_sms, impl, device, monkeypatch):
    """Partial results of any number of programs merge to the same attention."""
    arch = Arch("cuda", 90, num_sms, 232448)
    monkeypatch.setattr("tridraft.kernels.attention.arch_of", lambda _: arch)
    lengths = [(1, 300), (2, 70), (0, 0), (1, 33), (1, 1)]
    if INTERPRET and num_sms > 3:
        lengths = lengths[1:4]
    check(new_batch(lengths, num_heads=2, num_kv_heads=1, head_dim=16, device=device), impl)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "window"),
    [
        (256, 16, 20),
        gpu_only(256, 64, None),
        gpu_only(256, 1, None),
        gpu_only(512, 16, None),
        gpu_only(512, 16, 20),
        gpu_only(512, 64, 40),
    ],
)
def test_prefill_of_128_rows_a_tile(head_dim, block_size, window, impl, device, monkeypatch):
    """The tiles of long prompts, whose loads come first on Hopper, at lengths that the oracle can take."""
    arch = arch_of(device)._replace(num_sms=1)
    monkeypatch.setattr("tridraft.kernels.attention.arch_of", lambda _: arch)
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    lengths = [(33, 133), (17, 17)] if INTERPRET else [(33, 533), (0, 0), (70, 70), (3, 40)]
    batch = new_batch(
        lengths, num_heads=8, num_kv_heads=1, head_dim=head_dim, block_size=block_size, dtype=dtype, window=window,
        device=device,
    )  # fmt: skip
    check(batch, impl, window=window)


def test_large_scores_and_equal_keys(impl, device):
    """Scores in the thousands neither overflow nor cancel; equal ones average."""
    batch = new_batch([(1, 70), (2, 40)], head_dim=32, device=device)
    check(batch, impl, scale=1000.0)
    check(batch, impl, scale=0.0)


def test_refusals_name_the_argument():
    batch = new_batch([(1, 5)], head_dim=32)

    def call(**changes):
        names = ("q", "k_cache", "v_cache", "block_table", "query_start_loc", "seq_lens")
        arguments = dict(zip(names, batch.tensors, strict=True))
        return paged_attention(**{**arguments, "scale": 1.0, "max_query_len": 1, **changes})

    for name, value, error in (
        ("q", batch.q.long(), TypeError),
        ("q", batch.q[0], ValueError),
        ("q", batch.q[:, :3], ValueError),
        ("q", batch.q.mT.contiguous().mT, ValueError),
        ("k_cache", batch.k_cache.half(), TypeError),
        ("k_cache", batch.k_cache[..., :16], ValueError),
        ("v_cache", batch.v_cache[:1], ValueError),
        ("v_cache", batch.v_cache.to(FP8), TypeError),
        ("block_table", batch.block_table.long(), TypeError),
        ("block_table", batch.block_table[0], ValueError),
        ("query_start_loc", batch.query_start_loc[:1], ValueError),
        ("seq_lens", batch.seq_lens.to("meta"), ValueError),
        ("max_query_len", 0, ValueError),
        ("sliding_window", 0, ValueError),
        ("softcap", -1.0, ValueError),
        ("k_scale", torch.ones(3), ValueError),
        ("v_scale", torch.ones(1).half(), TypeError),
        ("out", torch.empty(2, 4, 32), ValueError),
        ("impl", "cuda", ValueError),
    ):
        with pytest.raises(error, match=f"^{name}: got"):
            call(**{name: value})


@pytest.mark.parametrize("layout", ["apart", "packed"])
@pytest.mark.parametrize("lengths", [[(1, 5), (2, 9)], [(18, 20)]])
@pytest.mark.compiled
def test_opcheck(lengths, layout, device):
    batch = new_batch(lengths, head_dim=32, layout=layout, device=device)
    scales = torch.ones(1, device=device), None
    settings = (1.0, batch.max_query_len, 7, None, True, torch.zeros_like(batch.q), device.type == "cuda")
    torch.library.opcheck(torch.ops.tridraft.paged_attention.default, (*batch.tensors, *scales, *settings))


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    batch = new_batch([(1, 5), (2, 9)], head_dim=32, device=device)
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty

    def layer(*tensors):
        return paged_attention(*tensors, scale=0.5, max_query_len=2, sliding_window=4) * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*batch.tensors), layer(*batch.tensors))


LIMITS = {
    "sm_75": Arch("cuda", 75, 40, 65536),
    "sm_80": Arch("cuda", 80, 108, 166912),
    "sm_89": Arch("cuda", 89, 128, 101376),
    "sm_90": Arch("cuda", 90, 132, 232448),
    "sm_120": Arch("cuda", 120, 170, 101376),
    "gfx942": Arch("hip", 942, 304, 65536),
}


@pytest.mark.parametrize("arch", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize(
    "dtypes", [(d, d) for d in (torch.bfloat16, torch.float16, torch.float32)] + [(torch.float16, FP8)]
)
def test_tiles_fit_shared_memory(dtypes: tuple[torch.dtype, torch.dtype], arch):
    """C17, C18: queries and every stage of keys and values at head 512, for decode and for 256 queries and more."""
    for head_dim in (16, 64, 96, 128, 192, 256, 512):
        for group in (1, 2, 5, 8, 16):  # 32 in float32 do not fit 64 KiB
            configs = [
                split_config(head_dim, group, queries, *dtypes, arch, programs, windowed)
                for queries in (1, 4, 8, SPLIT_QUERIES)
                for programs in (1, arch.num_sms, 1024)
                for windowed in (False, True)
            ]
            configs += [prefill_config(head_dim, group, *dtypes, arch, rows) for rows in (1024, 2**20)]
            for config in configs:
                assert shared_memory(config, head_dim, *dtypes, arch) <= arch.shared_memory
                assert config.block_m >= group
                columns = head_dim + min(config.block_v, head_dim)
                if config.num_stages > 1:
                    tiles = (config.num_stages - 1) * config.block_n * columns * dtypes[1].itemsize
                    needed = tiles + config.block_m * head_dim * dtypes[0].itemsize
                    assert needed <= arch.shared_memory


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 heads of 1024"):
        split_config(1024, 1, 1, torch.float32, torch.float32, LIMITS["sm_75"])


def test_short_windows_that_fill_the_gpu_are_not_split():
    """The grid's capacity decides, never the lengths; full attention stays split, as one request may be long."""
    sizes = (256, 8, 1, torch.bfloat16, torch.bfloat16, LIMITS["sm_90"])
    assert split_config(*sizes, programs=128, windowed=True).programs_per_sm == 0
    assert split_config(*sizes, programs=32, windowed=True).programs_per_sm > 0
    assert split_config(*sizes, programs=128, windowed=False).programs_per_sm > 0


@pytest.mark.compiled  # the interpreter takes as many parts and columns as it can
@pytest.mark.parametrize(
    ("parts", "rows", "requests", "head_dim"), [(2, 64, 32, 512), (8, 64, 8, 512), (4, 8, 32, 512), (4, 8, 32, 256)]
)
def test_combining_takes_one_wave_of_programs(parts, rows, requests, head_dim):
    """8 queries of 8 heads and single ones, over 132 multiprocessors that have room for 31 programs more each."""
    most, columns, num_warps = combine_config(parts, rows, requests, head_dim)
    assert most >= parts
    assert num_warps == 1
    assert rows * requests * -(-head_dim // columns) <= 132 * 31


def test_prefill_loads_first_where_hopper_multiplies_what_is_stored():
    for head_dim in (256, 512):
        sizes = (head_dim, 8, torch.bfloat16)
        assert prefill_config(*sizes, torch.bfloat16, LIMITS["sm_90"]).loads_first
        assert not prefill_config(*sizes, FP8, LIMITS["sm_90"]).loads_first
        assert not prefill_config(*sizes, torch.bfloat16, LIMITS["sm_80"]).loads_first
        assert not prefill_config(*sizes, torch.bfloat16, TARGETS["sm_100"][1]).loads_first


def variants(batch_size: int, window: int | None) -> set[tuple]:
    """What the launches for a batch are compiled for."""
    batch = new_batch([(1, 3)] * batch_size, head_dim=32)
    with record_launches(LIMITS["sm_90"]) as launches:
        for max_query_len in (1, 4, 32):
            paged_attention(
                *batch.tensors, scale=1.0, max_query_len=max_query_len, sliding_window=window, impl="triton"
            )
    keys = set()
    for launch in launches:
        key = [launch.kernel.__name__, *launch.options.items()]
        for parameter in launch.kernel.params:
            value = launch.arguments[parameter.name]
            if parameter.is_constexpr or (type(value) is int and not parameter.do_not_specialize and value == 1):
                key.append(value)
            elif type(value) is int and not parameter.do_not_specialize:
                key.append(value % 16 == 0)
        keys.add(tuple(key))
    return keys


@pytest.mark.compiled
@pytest.mark.parametrize("window", [None, 64])
def test_few_variants_serve_all_batch_sizes(window):
    """One size may have another rung than the next, but there are few rungs."""
    everything = set().union(*(variants(batch_size, window) for batch_size in range(1, 300, 7)))
    assert len(everything) <= 24


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kernel", "head_dim", "num_heads", "kv_dtype", "max_query_len", "options"),
    [
        ("", 512, 16, FP8, 1, {"k_scale": torch.ones(2), "v_scale": torch.ones(1)}),
        ("", 256, 8, torch.bfloat16, 1, {"sliding_window": 512, "metadata_ready": True}),
        pytest.param("split_kernel", 512, 16, FP8, 8, {"metadata_ready": True}, marks=pytest.mark.slow),
        ("prefill_kernel", 96, 10, FP8, 32, {"sliding_window": 64, "softcap": 50.0, "k_scale": torch.ones(1)}),
        ("split_kernel", 64, 8, torch.float32, 4, {"softcap": 50.0}),
        pytest.param("split_kernel", 512, 16, torch.bfloat16, 8, {}, marks=pytest.mark.slow),
        pytest.param("split_kernel", 256, 16, torch.bfloat16, 8, {}, marks=pytest.mark.slow),
        pytest.param("prefill_kernel", 512, 16, torch.bfloat16, 32, {}, marks=pytest.mark.slow),
        pytest.param("prefill_kernel", 256, 8, torch.bfloat16, 32, {}, marks=pytest.mark.slow),
    ],
    ids=[
        "decode_fp8",
        "window",
        "verify_fp8",
        "prefill_flags",
        "float32",
        "verify_512",
        "verify_256",
        "prefill_512",
        "prefill_256",
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, kernel, head_dim, num_heads, kv_dtype, max_query_len, options):
    """Every kernel, flag and kind of rung, each once: compilers take seconds for a kernel."""
    dtype = torch.bfloat16 if kv_dtype == FP8 else kv_dtype
    batch = new_batch([(1, 3)], num_heads=num_heads, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    gpu, arch = TARGETS[target]
    with record_launches(arch) as launches:
        paged_attention(*batch.tensors, scale=1.0, max_query_len=max_query_len, impl="triton", **options)
    compiled = [launch.compile(gpu) for launch in launches if kernel in launch.kernel.__name__]
    assert compiled
    assert all(binary.metadata.shared <= arch.shared_memory for binary in compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("max_query_len", [1, 5, 24])
def test_captured_at_one_length_and_replayed_at_others(max_query_len, device):
    """The first call is inside the capture, at length 3; padding rows and other lengths follow by replay."""
    requests, longest = 4, 3000
    batch = new_batch(
        [(max_query_len, longest)] * requests, num_heads=8, num_kv_heads=1, head_dim=256, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    q, starts = batch.q.clone(), batch.query_start_loc.clone()
    batch.seq_lens.fill_(max(3, max_query_len))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = paged_attention(*batch.tensors, scale=0.06, max_query_len=max_query_len)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lengths in (
        [(max_query_len, n) for n in (3000, 40, 1025, 2999)],
        [(1, 2500), (max_query_len, 700), (0, 0), (0, 0)],
    ):
        batch.q.copy_(q + 1)
        batch.seq_lens.copy_(torch.tensor([seq_len for _, seq_len in lengths]))
        batch.query_start_loc.copy_(torch.tensor([0] + [n for n, _ in lengths]).cumsum(0))
        batch.lengths = lengths
        out.fill_(float("nan"))
        graph.replay()
        rows = int(batch.query_start_loc[-1])
        batch.q, everything = batch.q[:rows], batch.q
        assert_close_to_float64(out[:rows], exact_attention(batch, scale=0.06), torch_attention(batch, scale=0.06))
        assert out[rows:].isnan().all()
        batch.q = everything
    assert starts[-1] == len(q)


@pytest.mark.gpu
def test_runs_are_equal(device):
    batch = new_batch(
        [(1, 2000), (3, 1500)], num_heads=8, num_kv_heads=1, head_dim=512, dtype=torch.bfloat16, device=device
    )
    runs = [paged_attention(*batch.tensors, scale=0.04, max_query_len=3) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_long_prompts(head_dim, window, device):
    """Hundreds of tiles in every program, several programs behind each other: the same in every run, and right."""
    batch = new_batch(
        [(2300, 2300), (300, 1100)], num_heads=8, num_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16,
        window=window, device=device,
    )  # fmt: skip
    options = {"scale": head_dim**-0.5, "max_query_len": 2300, "sliding_window": window}
    expected = paged_attention(*batch.tensors, **options, impl="eager")
    runs = [paged_attention(*batch.tensors, **options) for _ in range(5)]
    torch.testing.assert_close(runs[0], expected, atol=0.02, rtol=0.02)
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.gpu
@pytest.mark.parametrize("max_query_len", [1, 20])
def test_blocks_beyond_two_to_the_31st_element(max_query_len, device):
    """C22: the last blocks of a cache of more than 2³¹ elements, against the same keys in its first blocks."""
    head_dim, block_size, blocks = 512, 128, 32768 + 3
    cache = torch.zeros(blocks, block_size, 1, head_dim, dtype=torch.bfloat16, device=device)
    assert cache.numel() > 2**31
    seq_len = 300
    content = torch.randn(3, block_size, 1, head_dim, device=device)
    cache[:3] = content
    cache[-3:] = content
    q = torch.randn(max_query_len, 8, head_dim, dtype=torch.bfloat16, device=device)
    rest = (torch.tensor([0, max_query_len], device=device).int(), torch.tensor([seq_len], device=device).int())
    low, high = (
        paged_attention(
            q, cache, cache, torch.tensor([table], dtype=torch.int32, device=device), *rest, scale=0.04,
            max_query_len=max_query_len,
        )
        for table in ([0, 1, 2], [blocks - 3, blocks - 2, blocks - 1])
    )  # fmt: skip
    assert low.any()
    assert torch.equal(low, high)
