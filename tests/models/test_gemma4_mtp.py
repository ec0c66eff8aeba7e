"""Gemma4MTP against the `transformers` assistant on the same committed tokens, and against float64 algebra."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from _compare import assert_close_to_float64
from _paged_cache import PagedCache
from _tiny_gemma4 import VARIANTS, WINDOW, float64_copy, random_assistant, tiny_pair, worst_of
from tridraft.models.gemma4_mtp import Gemma4MTP, Gemma4MTPConfig
from tridraft.models.hf_target import HFTarget

pytest.importorskip("transformers")

STEPS = 4
# committed keys of each request: below, at and above the window of 8, and far above
LENGTHS = (1, 3, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 30)
SLIDING, FULL = "sliding_attention", "full_attention"


def dtypes(device):
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


@dataclass
class Drafted:
    """One request's K steps: logits [K, V] and the hidden state fed back [K, H]."""

    logits: Tensor
    hidden: Tensor


class Committed:
    """A pair, and requests of ragged lengths whose keys the target has computed, with a bonus token each."""

    def __init__(self, variant, device, dtype=torch.float32, lengths=LENGTHS, **generation_config):
        pair = tiny_pair(variant, device=device, dtype=dtype)
        self.theirs = copy.deepcopy(pair)
        self.target = HFTarget(pair.target)
        config = Gemma4MTPConfig.from_dict(pair.assistant.config.to_dict())
        self.draft = Gemma4MTP(config, generation_config, dtype=dtype, device=device)
        self.draft.check_target(self.target)
        self.draft.load_weights(pair.assistant.state_dict().items())
        self.draft.share_embedding(self.target.embed_weight, self.target.embed_scale)

        generator = torch.Generator().manual_seed(11)
        self.lengths = list(lengths)
        self.tokens = [
            torch.randint(3, self.target.vocab_size, (length + 1,), generator=generator).to(device)
            for length in lengths
        ]
        self.cache = PagedCache(self.target.kv_specs, len(lengths), 48, dtype=dtype, device=device)
        batch, positions = self.cache.batch([0] * len(lengths), self.lengths)
        rows = batch.query_start_loc[1:].long() - 1
        ids = torch.cat([tokens[:-1] for tokens in self.tokens])
        self.hidden = self.target.forward(ids, positions, self.cache.layers, batch, rows).hidden[rows]
        self.layers = [self.cache.layers[index] for index in self.draft.kv_sources(self.target)]

    def run(self, follow, *, rows=None, window_extra=1, position_shift=0, hidden=None):
        """Our K steps for all `rows` at once; step s + 1 is given `follow[row][s]`."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        lengths = [self.lengths[row] for row in rows]
        batch = self.cache.draft_batch(lengths, rows)
        positions = torch.tensor(lengths, device=self.target.device) + position_shift
        ids = torch.stack([self.tokens[row][-1] for row in rows])
        hidden = (self.hidden if hidden is None else hidden)[rows]
        logits, fed_back = [], []
        for step in range(STEPS):
            states, returned = self.draft(
                ids, positions, hidden, self.layers, batch, window_extra=window_extra, out_hidden=hidden
            )
            assert returned.data_ptr() == hidden.data_ptr()
            logits.append(self.draft.compute_logits(states))
            fed_back.append(hidden.clone())
            ids = torch.stack([follow[row][step] for row in rows])
        per_row = zip(torch.stack(logits, dim=1), torch.stack(fed_back, dim=1), strict=True)
        return [Drafted(*one) for one in per_row]


def together(runs) -> Drafted:
    """Every request's steps, one after another."""
    runs = list(runs)
    return Drafted(torch.cat([run.logits for run in runs]), torch.cat([run.hidden for run in runs]))


def transformers_draft(target, assistant, tokens, follow=None):
    """The reference's K steps on clean keys; the tokens it drafts, or those of `follow`."""
    output = target(tokens[None, :-1], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    keys = {kind: tuple(pair) for kind, pair in output.shared_kv_states.items()}
    hidden, token = output.hidden_states[-1][:, -1:], tokens[-1]
    position = torch.tensor([[len(tokens) - 1]], device=tokens.device)
    logits, fed_back, drafted = [], [], []
    for step in range(STEPS):
        embedded = target.get_input_embeddings()(token.view(1, 1))
        step_output = assistant(
            inputs_embeds=torch.cat((embedded, hidden), dim=-1),
            position_ids=position,
            shared_kv_states=keys,
            attention_mask=None,
            use_cache=False,
        )
        hidden = step_output.last_hidden_state
        logits.append(step_output.logits[0, 0])
        fed_back.append(hidden[0, 0])
        token = step_output.logits[0, 0].argmax() if follow is None else follow[step]
        drafted.append(token)
    return Drafted(torch.stack(logits), torch.stack(fed_back)), drafted


def check_against_transformers(committed: Committed, **settings: Any) -> None:
    """Our logits and fed-back hidden are as near to float64 as the reference's own, and the draft ids are its ids.

    Errors are taken over all requests and steps at once, and the reference's over two of its attention functions.
    """
    target, assistant = same_pair = committed.theirs.target, committed.theirs.assistant
    exact_pair = float64_copy(target), float64_copy(assistant)
    runs, follow = zip(*(transformers_draft(*exact_pair, tokens) for tokens in committed.tokens), strict=True)
    ours = together(committed.run(follow, **settings))
    exact = together(runs)
    same = []
    for attention in ("sdpa", "eager"):
        for model in same_pair:
            model.set_attn_implementation(attention)
        rows = zip(committed.tokens, follow, strict=True)
        same.append(together(transformers_draft(target, assistant, *row)[0] for row in rows))
    assert_close_to_float64(ours.hidden, exact.hidden, worst_of((run.hidden for run in same), exact.hidden))

    # In 16 bits a random model's best logits, and its centroids, are often nearer to each other than they are exact.
    whole = ours.hidden.dtype == torch.float32
    scored = ours.logits.isfinite()
    head = committed.draft.masked_embedding
    steps = torch.ones(len(scored), dtype=torch.bool, device=scored.device)
    if head is None:
        assert scored.all()
    else:  # the reference gives tokens outside the best centroids the least logit less 1
        selected = exact.logits > exact.logits.amin(-1, keepdim=True)
        steps = (scored == selected).all(-1)
        count = int(steps.sum())
        assert count >= (len(steps) if whole else len(steps) / 2), f"other centroids in {len(steps) - count} steps"
        scored &= steps[:, None]
        for run in same:  # the reference may have moved to another centroid itself
            scored &= run.logits > run.logits.amin(-1, keepdim=True)
    exact_scored = exact.logits[scored]
    same_scored = worst_of((run.logits[scored] for run in same), exact_scored)
    assert_close_to_float64(ours.logits[scored], exact_scored, same_scored)
    best = exact.logits.topk(2).values
    clear = steps & (best[:, 0] - best[:, 1] > 4 * (same_scored - exact_scored).abs().max())
    assert clear.sum() >= (len(clear) / 2 if whole else 1)
    assert torch.equal(ours.logits.argmax(-1)[clear], exact.logits.argmax(-1)[clear])


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_equal_transformers(variant, device):
    for dtype in dtypes(device):
        check_against_transformers(Committed(variant, device, dtype))


@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_position_off_by_one_is_noticed(variant, device):
    with pytest.raises(AssertionError, match="error"):
        check_against_transformers(Committed(variant, device, lengths=(9, 12)), position_shift=-1)


def test_hidden_before_the_final_norm_is_noticed(device):
    committed = Committed("plain", device, lengths=(9, 12))
    raw = []
    handle = committed.theirs.target.model.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0][0, -1]))
    for tokens in committed.tokens:
        committed.theirs.target(tokens[None, :-1], use_cache=False)
    handle.remove()
    check_against_transformers(committed)
    with pytest.raises(AssertionError, match="error"):
        check_against_transformers(committed, hidden=torch.stack(raw))


@pytest.mark.parametrize("length", [WINDOW + 1, 30])
def test_window_off_by_one_is_noticed(length, device):
    with pytest.raises(AssertionError, match="error"):
        check_against_transformers(Committed("plain", device, lengths=(length,)), window_extra=0)


def float64_step(weights, config, embedding, token, hidden, keys, position, window_extra):
    """One draft step of one request, written out in float64 from the checkpoint's tensors."""

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[name]

    x = weights["pre_projection.weight"] @ torch.cat((embedding[token], hidden))
    for index, (kind, spec) in enumerate(zip(config.layer_types, config.kv_specs, strict=True)):
        layer, half = f"model.layers.{index}.", spec.head_dim // 2
        pair = torch.arange(half, dtype=torch.float64, device=x.device)
        theta, turning = (1e4, half) if kind == SLIDING else (1e6, half // 4)
        angle = torch.where(pair < turning, position * theta ** (-2 * pair / spec.head_dim), 0)
        q = (weights[layer + "self_attn.q_proj.weight"] @ norm(x, layer + "input_layernorm.weight")).view(-1, 2 * half)
        q = norm(q, layer + "self_attn.q_norm.weight")
        q = torch.view_as_real(torch.complex(q[:, :half], q[:, half:]) * torch.polar(torch.ones_like(angle), angle))
        q = q.transpose(1, 2).flatten(1)
        k, v = (cache if kind == FULL else cache[-(spec.sliding_window + window_extra) :] for cache in keys[kind])
        group = q.shape[0] // spec.num_kv_heads
        scores = torch.einsum("hgd,thd->hgt", q.view(-1, group, spec.head_dim), k)
        attended = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).flatten()
        attended = weights[layer + "self_attn.o_proj.weight"] @ attended
        x = x + norm(attended, layer + "post_attention_layernorm.weight")
        y = norm(x, layer + "pre_feedforward_layernorm.weight")
        gate, up = (weights[f"{layer}mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        y = weights[layer + "mlp.down_proj.weight"] @ (torch.nn.functional.gelu(gate, approximate="tanh") * up)
        x = (x + norm(y, layer + "post_feedforward_layernorm.weight")) * weights[layer + "layer_scalar"]
    x = norm(x, "model.norm.weight")
    return weights["model.embed_tokens.weight"] @ x, weights["post_projection.weight"] @ x


@pytest.mark.parametrize("draft_position", ["bonus", "last_computed"])
@pytest.mark.parametrize("variant", ["plain", "k_eq_v", "kv_shared", "moe"])
def test_both_draft_positions_equal_float64_algebra(variant, draft_position, device):
    """From the bonus token: position P and W + 1 keys. From the last computed one: position P − 1 and W keys."""
    committed = Committed(variant, device)
    extra, shift = (1, 0) if draft_position == "bonus" else (0, -1)
    weights = {name: tensor.double() for name, tensor in committed.theirs.assistant.state_dict().items()}
    embedding = committed.target.embed_weight.double() * committed.target.embed_scale
    cache, kinds = committed.cache, committed.draft.layer_types
    follow = [torch.randint(3, 100, (STEPS,), device=device) for _ in LENGTHS]
    ours = committed.run(follow, window_extra=extra, position_shift=shift)
    for row, (length, tokens) in enumerate(zip(LENGTHS, committed.tokens, strict=True)):
        keys = {}
        for kind, layer in zip(kinds, committed.layers, strict=True):
            table = cache.tables[layer.group][row].long()
            keys[kind] = tuple(x[table].flatten(0, 1)[:length].double() for x in (layer.k_cache, layer.v_cache))
        hidden, logits, fed_back = committed.hidden[row].double(), [], []
        for token in (tokens[-1], *follow[row][:-1]):
            step_logits, hidden = float64_step(
                weights, committed.draft.config, embedding, token, hidden, keys, length + shift, extra
            )
            logits.append(step_logits)
            fed_back.append(hidden)
        # Four layers of float32 sums over at most 224 terms, four steps deep: 1e-5 of values up to about 5. A key
        # more or less in the window, or another position, changes them by more than 1e-2.
        torch.testing.assert_close(ours[row].logits.double(), torch.stack(logits), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours[row].hidden.double(), torch.stack(fed_back), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_a_row_does_not_depend_on_its_neighbours(variant, device):
    committed = Committed(variant, device)
    follow = [torch.full((STEPS,), 5, device=device) for _ in LENGTHS]
    everyone = committed.run(follow)
    for row in (0, 3, 6):
        (alone,) = committed.run(follow, rows=[row])
        # another number of rows sums matrix products in another order
        torch.testing.assert_close(alone.logits, everyone[row].logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_sample_equals_the_logits_argmax(variant, device):
    committed = Committed(variant, device)
    rows = len(LENGTHS)
    states, _ = committed.draft(
        torch.stack([tokens[-1] for tokens in committed.tokens]),
        torch.tensor(LENGTHS, device=device),
        committed.hidden,
        committed.layers,
        committed.cache.draft_batch(LENGTHS),
        window_extra=1,
    )
    slots = torch.arange(rows, device=device).flip(0)
    seeds = torch.arange(rows, device=device)
    positions = torch.tensor(LENGTHS, device=device)
    greedy = torch.zeros(rows, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    drafted = committed.draft.sample(states, slots, greedy, seeds, positions, out=out)
    assert drafted.data_ptr() == out.data_ptr()
    logits = committed.draft.compute_logits(states)
    assert torch.equal(out, logits.argmax(-1))

    # with the logits kept for verification: the same draws, and the logits they were drawn from
    warm = torch.full((rows,), 0.8, device=device)
    kept = torch.full((rows, STEPS, committed.draft.vocab_size), 7.0, device=device)
    step = torch.tensor(2, device=device)
    plain = committed.draft.sample(states, slots, warm, seeds, positions)
    stored = committed.draft.sample(states, slots, warm, seeds, positions, draft_logits_out=kept, draft_step=step)
    assert torch.equal(plain, stored)
    torch.testing.assert_close(kept[slots, 2], logits.float(), rtol=1e-5, atol=1e-5)
    assert (kept[:, [0, 1, 3]] == 7).all()


def test_an_fp8_head_is_the_dense_one_with_rounded_rows(device):
    draft = Committed("plain", device, suppress_tokens=[3, 77]).draft
    head = draft.fp8_head()
    states, slots = torch.randn(64, draft.hidden_size, device=device), torch.arange(64, device=device)
    tokens = draft.sample(states, slots, torch.zeros(64, device=device), slots, slots, fp8_head=head)
    logits = states.double() @ (head.weight.double() * head.scale.double()[:, None]).T
    logits[:, [3, 77]] = -torch.inf
    assert torch.equal(tokens, logits.argmax(-1))
    assert not torch.equal(tokens, draft.compute_logits(states).argmax(-1))
    with pytest.raises(ValueError, match="lm_head_dtype: got 'fp8', needs 'auto' with a centroid head"):
        Committed("ordered", device).draft.fp8_head()


@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_suppressed_tokens_are_never_drafted_in_either_head(variant, device):
    free = Committed(variant, device)
    follow = [torch.full((STEPS,), 5, device=device) for _ in LENGTHS]
    drafted = [int(drafted.logits[0].argmax()) for drafted in free.run(follow)]
    suppressed = Committed(variant, device, suppress_tokens=drafted)
    assert suppressed.draft.suppress_ids is not None
    assert suppressed.draft.suppress_ids.tolist() == sorted(set(drafted))
    for before, after in zip(free.run(follow), suppressed.run(follow), strict=True):
        assert (after.logits[:, drafted] == -torch.inf).all()
        others = [token for token in range(128) if token not in drafted]
        assert torch.equal(after.logits[:, others], before.logits[:, others])

    states = torch.randn(4, free.draft.hidden_size, device=device)
    slots = torch.arange(4, device=device)
    for temperature in (0.0, 1.5):
        tokens = suppressed.draft.sample(states, slots, torch.full((4,), temperature, device=device), slots, slots)
        assert not set(tokens.tolist()) & set(drafted)


def test_c3_no_mass_outside_the_candidates(device):
    draft = Committed("ordered", device, lengths=(3,)).draft
    states = torch.randn(5, draft.hidden_size, device=device)
    logits = draft.compute_logits(states)
    scored = logits.isfinite()
    assert (scored.sum(-1) == 4 * 8).all()
    assert (logits.softmax(-1)[~scored] == 0).all()
    # a candidate at −inf: suppressed, it neither becomes NaN nor spreads
    best = int(logits[0].argmax())
    draft = Committed("ordered", device, lengths=(3,), suppress_tokens=[best]).draft
    logits = draft.compute_logits(states)
    assert logits[0, best] == -torch.inf
    assert not logits.softmax(-1).isnan().any()


def test_c23_owns_no_keys_and_writes_none(device):
    committed = Committed("plain", device)
    assert not [name for name, _ in committed.draft.named_parameters() if "k_proj" in name or "v_proj" in name]
    before = [(layer.k_cache.clone(), layer.v_cache.clone()) for layer in committed.cache.layers]
    committed.run([torch.full((STEPS,), 5, device=device) for _ in LENGTHS])
    for layer, (k_cache, v_cache) in zip(committed.cache.layers, before, strict=True):
        assert torch.equal(layer.k_cache.view(torch.int32), k_cache.view(torch.int32))
        assert torch.equal(layer.v_cache.view(torch.int32), v_cache.view(torch.int32))


def test_forward_without_embedding_is_refused():
    pair = tiny_pair("plain")
    draft = Gemma4MTP(Gemma4MTPConfig.from_dict(pair.assistant.config.to_dict()))
    with pytest.raises(RuntimeError, match="share_embedding"):
        draft(torch.zeros(1, dtype=torch.int64), None, None, (), None, window_extra=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["12b", "e2b"])
def test_released_sizes_draft_in_one_graph(name, device):
    """K steps of a released assistant recorded with no step before, replayed on other tokens, equal the eager loop."""
    draft = random_assistant(name, device, torch.bfloat16)
    lengths = [5, 1500, 700]
    cache = PagedCache(draft.kv_specs, len(lengths), 1504, dtype=torch.bfloat16, device=device)
    for layer in cache.layers:
        layer.k_cache.normal_()
        layer.v_cache.normal_()
    batch = cache.draft_batch(lengths)
    positions = torch.tensor(lengths, device=device)
    tokens = torch.tensor([3, 70_000, 200_000], device=device)
    start = torch.randn(3, draft.backbone_hidden_size, device=device, dtype=torch.bfloat16)
    hidden = start.clone()
    slots, seeds = torch.arange(3, device=device), torch.arange(3, device=device)
    temperature = torch.tensor([0.0, 0.7, 0.0], device=device)
    drafts = torch.zeros(STEPS, 3, dtype=torch.int64, device=device)
    sampled_at = [positions + step for step in range(STEPS)]

    def propose():
        ids = tokens
        for step in range(STEPS):
            states, _ = draft(ids, positions, hidden, cache.layers, batch, window_extra=1, out_hidden=hidden)
            ids = draft.sample(states, slots, temperature, seeds, sampled_at[step], out=drafts[step])

    torch.mm(start, start.t())  # cuBLAS makes its handle at a process's first product, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        propose()
    tokens.copy_(torch.tensor([9, 8, 7], device=device))
    hidden.copy_(start)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replayed, replayed_hidden = drafts.clone(), hidden.clone()
    hidden.copy_(start)
    propose()
    assert torch.equal(replayed, drafts)
    assert torch.equal(replayed_hidden, hidden)
    if draft.suppress_ids is not None:
        assert not torch.isin(drafts, draft.suppress_ids).any()
    assert ((drafts >= 0) & (drafts < draft.vocab_size)).all()
