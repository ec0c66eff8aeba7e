"""Blocks: grouping, reserving, freeing, and tables by row."""

import pytest
import torch

from tridraft.models.paged import KVSpec
from tridraft.speculator.kv_cache import KVCache

SLIDING, FULL = KVSpec(16, 2, 8), KVSpec(32, 1, None)


def cache(device, specs=(SLIDING, SLIDING, FULL), **options):
    sizes = {"num_blocks": 6, "block_size": 4, "max_num_reqs": 3, "max_model_len": 20, "dtype": torch.float32}
    return KVCache(specs, **{**sizes, **options}, device=device)


def test_layers_of_one_kind_share_a_table(device):
    kv = cache(device)
    assert [layer.group for layer in kv.layers] == [0, 0, 1]
    assert [list(layer.k_cache.shape) for layer in kv.layers] == [[6, 4, 2, 16]] * 2 + [[6, 4, 1, 32]]
    assert kv.layers[0].k_cache.data_ptr() != kv.layers[1].k_cache.data_ptr()
    assert [list(table.shape) for table in kv.tables] == [[3, 5], [3, 5]]
    assert all(table.dtype == torch.int32 and (table == -1).all() for table in kv.tables)


def test_same_heads_and_another_window_is_another_group(device):
    kv = cache(device, specs=(KVSpec(16, 2, 8), KVSpec(16, 2, None), KVSpec(16, 2, 8)))
    assert [layer.group for layer in kv.layers] == [0, 1, 0]


def test_reserve_keeps_what_a_slot_has(device):
    kv = cache(device)
    kv.reserve(1, 5)
    before = kv.tables[0][1].tolist()
    assert before[2:] == [-1, -1, -1]
    kv.reserve(1, 8)
    assert kv.tables[0][1].tolist() == before
    kv.reserve(1, 9)
    after = kv.tables[0][1].tolist()
    assert after[:2] == before[:2]
    assert after[3:] == [-1, -1]
    assert kv.num_free_blocks == 3
    kv.reserve(1, 2)
    assert kv.num_free_blocks == 3


def test_no_block_has_two_owners(device):
    kv = cache(device)
    for slot, tokens in ((0, 8), (2, 9), (1, 4)):
        kv.reserve(slot, tokens)
    for table in kv.tables:
        owned = table[table >= 0].tolist()
        assert sorted(owned) == list(range(6))


def test_out_of_blocks_reserves_nothing_and_names_the_setting(device):
    kv = cache(device)
    kv.reserve(0, 16)
    tables = [table.clone() for table in kv.tables]
    with pytest.raises(RuntimeError, match=r"3 more blocks of 4 and 2 are free: raise num_blocks \(now 6\)"):
        kv.reserve(1, 12)
    assert kv.num_free_blocks == 2
    assert all(torch.equal(table, before) for table, before in zip(kv.tables, tables, strict=True))
    kv.reserve(1, 8)


def test_past_max_model_len_is_refused(device):
    with pytest.raises(ValueError, match="max_model_len is 20"):
        cache(device).reserve(0, 21)


def test_freed_blocks_are_given_again(device):
    kv = cache(device)
    kv.reserve(0, 20)
    kv.free(0)
    assert kv.num_free_blocks == 6
    assert all((table == -1).all() for table in kv.tables)
    kv.free(0)
    kv.reserve(2, 20)
    assert kv.num_free_blocks == 1


def test_tables_by_row(device):
    kv = cache(device)
    kv.reserve(0, 4)
    kv.reserve(2, 8)
    rows = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    for table, gathered in zip(kv.tables, kv.block_tables(rows), strict=True):
        assert torch.equal(gathered[0], table[2])
        assert torch.equal(gathered[2], table[0])
    out = [torch.zeros(3, 5, dtype=torch.int32, device=device) for _ in kv.tables]
    filled = kv.block_tables(rows, out)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(filled, out, strict=True))
    assert torch.equal(out[1][0], kv.tables[1][2])


def test_fp8_layers_have_scales(device):
    kv = cache(device, dtype=torch.float8_e4m3fn)
    for layer in kv.layers:
        for scale in (layer.k_scale, layer.v_scale):
            assert scale is not None
            assert scale.tolist() == [1.0]
    assert cache(device).layers[0].k_scale is None


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_reqs", "max_model_len"])
def test_sizes_are_checked(device, name):
    with pytest.raises(ValueError, match=f"{name}: got 0, needs at least 1"):
        cache(device, **{name: 0})
    with pytest.raises(ValueError, match="specs: got none"):
        cache(device, specs=())
