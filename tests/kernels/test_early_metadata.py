"""Attention that reads its metadata while the launch before it ends, and with that the keys that one writes."""

import pytest
import torch

from _attention_batches import new_batch
from tridraft.kernels.attention import FP8, paged_attention
from tridraft.kernels.draft_inputs import compute_slot_mapping
from tridraft.kernels.kv_cache import write_kv


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "head_dim", "kv_dtype", "window"),
    [
        ([(1, 1500)], 1, 512, torch.bfloat16, None),
        ([(4, 700)], 1, 512, torch.bfloat16, None),
        ([(1, 1500)], 1, 512, FP8, None),
        ([(3, 700)], 2, 96, torch.bfloat16, 100),
        ([(1, 40), (0, 0), (1, 1), (1, 333)] * 10, 4, 256, torch.bfloat16, 32),
    ],
    ids=["one", "verify", "fp8", "window", "windows"],
)
def test_keys_of_the_launch_before_are_seen_when_metadata_is_ready(
    lengths, num_kv_heads, head_dim, kv_dtype, window, block_size, device
):
    """Parts ask for their first tile before the wait, while the newest keys, which are in it, are still written."""
    batch = new_batch(
        lengths,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        window=window,
        device=device,
    )
    places = [key for queries, keys in lengths for key in range(keys - queries, keys)]
    slots = compute_slot_mapping(
        torch.tensor(places, device=device), batch.query_start_loc, batch.block_table, block_size, max_model_len=2048
    )
    options = {"scale": 0.04, "max_query_len": batch.max_query_len, "sliding_window": window}
    written = torch.randn(20, 2, len(places), num_kv_heads, head_dim, device=device).bfloat16()
    outs = []
    for k, v in written:
        write_kv(k, v, batch.k_cache, batch.v_cache, slots)
        outs.append(paged_attention(*batch.tensors, **options, metadata_ready=True))
    for (k, v), out in zip(written, outs, strict=True):
        write_kv(k, v, batch.k_cache, batch.v_cache, slots)
        torch.cuda.synchronize()
        assert torch.equal(out, paged_attention(*batch.tensors, **options))
