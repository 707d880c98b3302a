"""Models: every mixer token by token, in chunks and packed is one model; fla's names, shapes and logits; errors."""

import copy
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from cases import SMALL_MODEL, Dispatched, tensors_in, thin
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import gla_ref.models.mixers as mixers
from gla_ref import FORMS
from gla_ref.models import MIXERS, Config, LanguageModel, _forms, checkpoints, config, detach, next_tokens
from gla_ref.models.layer import LayerState, ShortConvolution
from gla_ref.rounding import error

CUDA = torch.cuda.is_available()
# fla 0.6.0's configurations, names, shapes and logits, by benchmarks/fla_models.py of commit 8eed72c
FACTS = json.loads((Path(__file__).parent / "fla_gla.json").read_text())
HYBRIDS = {"hybrid": ("gla", "softmax"), "kda hybrid": ("softmax", "kda")}  # a mixer for each layer, by a name
WAYS = [*MIXERS, *HYBRIDS]
KINDS = [(mixer, conv) for mixer in WAYS for conv in (False, True)]
every = pytest.mark.parametrize("mixer", MIXERS)
ways = pytest.mark.parametrize("mixer", WAYS)
quick = ("gla", "softmax", *HYBRIDS)
kinds = pytest.mark.parametrize("mixer, conv", thin(KINDS, *[(m, m in quick) for m in WAYS]))


def make(mixer="gla", *, dtype=torch.float64, **fields) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Config(**SMALL_MODEL | {"mixer": HYBRIDS.get(mixer, mixer)} | fields)).to(dtype)


def some(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def close(x, y, tolerance=1e-9):
    assert x.shape == y.shape and (x - y).abs().max() < tolerance


def test_a_config_knows_every_mixer():
    assert config.MIXER_NAMES == tuple(MIXERS)


# -- one model, however its tokens come ---------------------------------------------------------


@kinds
@torch.no_grad()
def test_steps_pieces_and_whole_are_one(mixer, conv):
    model, tokens = make(mixer, use_short_conv=conv), some(2, 75)  # more than one chunk
    whole, state = model(tokens)
    first, before = model(tokens[:, :69])
    logits, stepped = [first], before
    for t in range(69, 75):
        logits.append(model(tokens[:, t : t + 1], state=stepped)[0])
        stepped = model(tokens[:, t : t + 1], state=stepped)[1]
    close(torch.cat(logits, 1), whole)
    rest, after = model(tokens[:, 69:], state=before)  # the earlier state is as it was
    close(rest, whole[:, 69:])
    for a, b, c in zip(*map(tensors_in, (after, state, stepped)), strict=True):
        close(a, b)
        close(c, b)


@kinds
@torch.no_grad()
def test_packed_documents_are_those_apart(mixer, conv):
    model = make(mixer, use_short_conv=conv)
    texts, more = ([some(1, n + m) for n in sizes] for m, sizes in ((0, (7, 1, 12)), (1, (2, 5, 0))))
    ends = torch.tensor([0, 7, 7, 8, 20])  # the second document is empty
    packed, state = model(torch.cat(texts, 1), cu_seqlens=ends)
    close(packed, torch.cat([model(text)[0] for text in texts], 1))
    texts.insert(1, some(1, 0))
    more.insert(2, some(1, 0))
    longer, _ = model(torch.cat(more, 1), state=state, cu_seqlens=torch.tensor([0, 3, 9, 9, 10]))
    pairs = [pair for pair in zip(texts, more, strict=True) if pair[1].numel()]
    close(longer, torch.cat([model(torch.cat(pair, 1))[0][:, pair[0].shape[1] :] for pair in pairs], 1))


def greedy(model, prompt, n):
    """The likeliest continuation by whole sequences, without any state."""
    tokens = prompt[None]
    for _ in range(n):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :]


@kinds
@torch.no_grad()
def test_generate_is_the_whole_model_token_by_token(mixer, conv):
    model = make(mixer, use_short_conv=conv)
    prompts = [some(5), some(11)[::2], some(13)]
    written, state = model.generate(prompts, 3, chunk=4)
    assert all(torch.equal(w, greedy(model, p, 3)) for w, p in zip(written, prompts, strict=True))
    answers = [some(2), some(6), some(1)]  # the conversation goes on
    again, _ = model.generate(answers, 2, state=state, chunk=4)
    for p, w, a, found in zip(prompts, written, answers, again, strict=True):
        assert torch.equal(found, greedy(model, torch.cat([p, w, a]), 2))
    equal, _ = model.generate(torch.stack([prompts[0], prompts[1][:5]]), 3, chunk=4)
    assert torch.equal(equal[0], written[0])


def test_drawn_tokens():
    model, prompt = make(), some(1, 4)

    def draw(seed, temperature=1.0):
        return model.generate(prompt, 8, temperature=temperature, generator=torch.Generator().manual_seed(seed))[0]

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0, 1e-6), model.generate(prompt, 8)[0])


# -- learning ----------------------------------------------------------------------------------


def gradients(model, tokens):
    return torch.autograd.grad(model.loss(tokens)[0], list(model.parameters()))


@ways
def test_gradients_flow_to_every_parameter(mixer):
    assert all(g.abs().sum() > 0 for g in gradients(make(mixer, use_short_conv=True, qk_norm=True), some(2, 12)))


@pytest.mark.deep  # the first checkpoint of a process imports PyTorch's compiler: seconds
@ways
def test_gradient_checkpointing(mixer):
    model, tokens = make(mixer, use_short_conv=True), some(2, 12)
    plain, calls = gradients(model, tokens), []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.model.gradient_checkpointing = True
    assert all(torch.equal(*pair) for pair in zip(gradients(model, tokens), plain, strict=True))
    hook.remove()
    assert len(calls) == 2, "made again for the backward pass"


@pytest.mark.parametrize("mixer", thin(WAYS, "gla", "kda", "softmax", "hybrid"))
def test_autocast(mixer):
    """Products in bfloat16, states in float32; the loss stays near."""
    model, tokens = make(mixer, dtype=torch.float32, qk_norm=True), some(2, 12)
    exact = model.loss(tokens)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rough, state = model.loss(tokens)
    assert model.model.layers[0].attn.q_proj(torch.zeros(1, 16)).dtype == torch.float32
    assert 0 < abs(rough - exact) < 0.05 * exact
    rough.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    for layer, own in zip(state, model.config.layers(), strict=True):  # a cache has the dtype of its keys
        kept = torch.bfloat16 if own.mixer == "softmax" else torch.float32
        assert {x.dtype for x in tensors_in(layer)} == {kept}


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "softmax"])
@pytest.mark.parametrize("weights, head_norm", [("float16", "rms"), ("float16", "layer"), ("float32", "rms")])
def test_a_readout_beyond_float16_is_normalised(mixer, weights, head_norm):
    """Float16 weights and float16 by autocast; a state of millions, as a long text can leave it."""
    mixing = make(mixer, dtype=torch.float16, head_norm=head_norm).float().model.layers[0].attn
    rng, seen = torch.Generator().manual_seed(0), []
    x = torch.randn(1, 12, 16, generator=rng).half().float()
    state = LayerState(1e7 * torch.randn(1, 2, 4, 8, generator=rng))
    mixing.g_norm_swish_gate.register_forward_pre_hook(lambda module, args: seen.append(args[0].abs().max().item()))
    exact, _ = mixing(x, state)
    assert seen[0] > 2 * torch.finfo(torch.float16).max
    if weights == "float16":
        y, after = mixing.half()(x.half(), state)
    else:
        with torch.autocast("cpu", torch.float16):
            y, after = mixing(x, state)
    assert y.dtype == torch.float16 and after.S.dtype == torch.float32
    assert error(y.float(), exact) < 0.02
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixing.parameters())


def test_loss_is_the_mean_over_what_counts():
    model, tokens = make(), some(2, 9)
    logits = model(tokens)[0].log_softmax(-1)
    own = -logits[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
    close(model.loss(tokens)[0], own)
    targets = torch.full_like(tokens, -100)
    targets[1, 4] = 3
    close(model.loss(tokens, targets)[0], -logits[1, 4, 3])


@pytest.mark.deep  # as above
def test_loss_in_pieces(monkeypatch):
    model, tokens = make(), some(2, 9)
    whole = model.loss(tokens)[0]
    (wanted,) = torch.autograd.grad(whole, [model.lm_head.weight])
    monkeypatch.setattr("gla_ref.models.language_model.LOSS_TOKENS", 4)
    pieces = model.loss(tokens)[0]
    close(pieces, whole)
    close(*torch.autograd.grad(pieces, [model.lm_head.weight]), wanted)


@ways
@pytest.mark.parametrize("packed", [False, True])
def test_a_state_of_the_wrong_number_of_sequences_is_named(mixer, packed):
    model = make(mixer, use_short_conv=True)
    _, state = model(some(1, 6), cu_seqlens=torch.tensor([0, 2, 6])) if packed else model(some(2, 3))
    with pytest.raises(ValueError, match=r"^state\[0\].S: expected 3 sequences as in tokens, got 2"):
        model(some(3, 4), state=state)
    model(some(2, 4), state=state)


def test_int32_tokens_have_a_loss():
    model, tokens = make(), some(2, 5)
    assert model.loss(tokens.int())[0] == model.loss(tokens)[0]


def test_boundaries_are_checked_before_they_are_indices(monkeypatch):
    """On a GPU an index outside ends the process; here, it must not even reach the convolution."""
    model = make(use_short_conv=True)
    monkeypatch.setattr(model.model, "forward", lambda *_: pytest.fail("the model was called"))
    for cu in ([0, 3, 99], [0, -5, 9], [1, 9], [0, 7, 5, 9]):
        with pytest.raises(ValueError, match="^cu_seqlens: expected to rise from 0 to T = 9"):
            model(some(1, 9), cu_seqlens=torch.tensor(cu))


def test_the_gradient_of_gla_grows_with_the_length():
    """Numbers that operators write, forward and backward: twice as many for twice the tokens, on a CPU too."""
    model, work = make(num_hidden_layers=1), {}
    for T in (64, 128, 256):
        with Dispatched() as run:
            model.loss(some(1, T))[0].backward()
        results = (out if isinstance(out, tuple | list) else [out] for _, out in run.calls)
        work[T] = sum(x.numel() for out in results for x in out if torch.is_tensor(x))
    assert (work[256] - work[128]) / (work[128] - work[64]) == pytest.approx(2, rel=0.02)


def test_which_document_a_token_is_of():
    ends = torch.tensor([0, 0, 2, 2, 5])
    assert _forms.owners(ends, 5).tolist() == [1, 1, 3, 3, 3]
    assert _forms.places(ends, 5).tolist() == [0, 1, 0, 1, 2]


def test_targets_do_not_cross_documents():
    tokens = torch.arange(6)[None]
    assert next_tokens(tokens).tolist() == [[1, 2, 3, 4, 5, -100]]
    ends = torch.tensor([0, 0, 2, 2, 6])
    assert next_tokens(tokens, ends).tolist() == [[1, -100, 3, 4, 5, -100]]
    assert tokens.tolist() == [list(range(6))]


@pytest.mark.parametrize("mixer", ["gla", "softmax", "hybrid"])
def test_truncated_backpropagation_passes_the_state_and_cuts_the_gradient(mixer):
    model, tokens = make(mixer, use_short_conv=True), some(1, 16)
    _, state = model.loss(tokens[:, :8])
    cut, _ = model.loss(tokens[:, 8:], state=detach(state))
    through, _ = model.loss(tokens[:, 8:], state=state)
    assert cut == through and cut != model.loss(tokens[:, 8:])[0]
    assert not any(x.requires_grad for x in tensors_in(detach(state)))
    weight = model.model.layers[0].attn.k_proj.weight
    (short,), (long,) = (torch.autograd.grad(x, weight, retain_graph=True) for x in (cut, through))
    assert (short - long).abs().max() > 1e-6


# -- sizes -------------------------------------------------------------------------------------


def count(module, without=()) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if not any(part in name for part in without))


@every
def test_a_mixer_has_four_d_squared_parameters(mixer):
    d, H = 64, 4
    layer = MIXERS[mixer](Config(hidden_size=d, num_heads=H, mixer=mixer))
    assert count(layer, ["gk_proj", "norm", "dt", "b_proj"]) == 4 * d * d
    gates = {
        "gla": 16 * (d + d // 2) + d // 2,
        "scalar": d * H + H,
        "mamba2": d * H + 2 * H,
        "gated_delta": 2 * d * H + 2 * H,
        "kda": 16 * (d + d // 2) + d // 2 + H + d * H,
    }
    assert count(layer) == 4 * d * d + gates.get(mixer, 0) + (0 if mixer == "softmax" else d // H)


@pytest.mark.parametrize("d", thin(FACTS["parameters"], "1024"))
def test_parameters_of_the_published_sizes(d):
    """They are as many as fla counts with its defaults at widths of 1024 and 2048."""
    with torch.device("meta"):
        assert count(LanguageModel(Config(hidden_size=int(d)))) == FACTS["parameters"][d]


def test_gates_begin_where_the_bias_puts_them():
    """Small weights and no bias: alpha is sigmoid(0)^(1/16), and half is forgotten after 16 tokens."""
    layer = make(initializer_range=1e-3, tau=16.0).model.layers[0].attn
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    g = layer.gates(x)
    assert (g.exp() - 0.5 ** (1 / 16)).abs().max() < 1e-4


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name not in ("softmax", "gated_delta", "kda", "mamba2")])
def test_small_convolutions_start_a_head_below_the_epsilon_of_its_norm(mixer):
    """So the norm passes a thousandth of a head's output; PyTorch's start of convolutions does not do that."""
    sizes = {}
    for conv_range in (None, 0.02):
        fields = {"mixer": mixer, "use_short_conv": True, "conv_range": conv_range, "vocab_size": 64}
        model = LanguageModel(Config(hidden_size=128, num_hidden_layers=1, num_heads=2, **fields))
        norm, seen = model.model.layers[0].attn.g_norm_swish_gate, []
        norm.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        model(torch.randint(64, (2, 256)))
        sizes[conv_range] = seen[0].square().mean() / norm.eps
    assert sizes[None] > 0.5 and sizes[0.02] < 1e-4


@pytest.mark.parametrize("mixer", [*MIXERS])
def test_output_range_sets_the_start_of_the_mixers_outputs_alone(mixer):
    fields = {"mixer": mixer, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}
    usual, quiet = (dict(LanguageModel(Config(**fields, output_range=x)).named_parameters()) for x in (None, 1e-3))
    for name in usual:
        if name.endswith(".proj.weight") or name.endswith("_proj.weight"):
            expected = 1e-3 if name.endswith("attn.o_proj.weight") else 0.02
            assert quiet[name].std().item() == pytest.approx(expected, rel=0.2), name
            assert usual[name].std().item() == pytest.approx(0.02, rel=0.2), name
    assert sum(name.endswith("attn.o_proj.weight") for name in usual) == 2


@ways
@pytest.mark.parametrize(
    "fields",
    [{}, {"use_short_conv": True, "conv_range": None, "output_range": 1e-3, "lower_bound": -5, "qk_norm": True}],
)
def test_a_model_made_on_meta_starts_as_one_made_on_the_cpu(mixer, fields):
    config = Config(**SMALL_MODEL | {"mixer": HYBRIDS.get(mixer, mixer)} | fields)
    torch.manual_seed(7)
    made = LanguageModel(config)
    with torch.device("meta"):
        late = LanguageModel(config)
    late.to_empty(device="cpu")
    for parameter in late.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(7)
    late.reset_parameters()
    for (name, x), y in zip(made.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_fixed_and_scalar_gates():
    layer = mixers.RetNet(Config(**SMALL_MODEL | {"num_heads": 4}))
    g = layer.gates(torch.zeros(2, 3, 16))
    assert g.shape == (2, 3, 4)
    torch.testing.assert_close(g[0, 0].exp(), torch.tensor([1 - 2**-5, 1 - 2**-6, 1 - 2**-7, 1 - 2**-8]))
    delta, g = make("mamba2").model.layers[0].attn.dt(torch.zeros(1, 1, 16, dtype=torch.float64))
    assert ((delta > 0.0009) & (delta < 0.11)).all() and (g < 0).all()


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gates_of_kda(bound):
    """They begin mild, and strong logits make strong ones, of which a bound is the limit; all of it learns."""
    layer = make("kda", lower_bound=bound).model.layers[0].attn
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    start, g, strong = (layer.gates(c * x) for c in (0, 1, 1e3))
    assert ((start < -0.0009) & (start > -1.7)).all() and start.shape == (2, 3, 2, 4)
    assert layer.dt.A_log.any() == (bound is None), "with a bound all rates begin at 1"
    assert strong.max() <= 0 and (strong.min() < -100 if bound is None else abs(strong.min() - bound) < 1e-9)
    assert all(d.abs().sum() > 0 for d in torch.autograd.grad(g.sum(), list(layer.dt.parameters())))


def test_positions_turn_and_keep_their_length():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    turned = mixers.rotate(x, torch.tensor([0, 5, 9]))
    close(turned[:, 0], x[:, 0])
    close(turned.norm(dim=-1), x.norm(dim=-1))
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):  # depends on the distance alone
        return (mixers.rotate(q, torch.tensor([i])) * mixers.rotate(k, torch.tensor([j]))).sum()

    close(score(7, 3), score(104, 100))
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


@torch.no_grad()
def test_normalised_queries_and_keys_bound_the_scores():
    """Weights of any size make the same scores; without the norms larger ones make other logits."""
    for qk_norm in (True, False):
        model = make("softmax", qk_norm=qk_norm, norm_eps=1e-24)
        before = model(some(1, 9))[0]
        for block in model.model.layers:
            block.attn.q_proj.weight.mul_(1e3)
        assert ((model(some(1, 9))[0] - before).abs().max() < 1e-9) == qk_norm


def test_layer_norm_is_the_papers():
    model, x = make(head_norm="layer"), torch.randn(1, 2, 2, 8, dtype=torch.float64)
    y = model.model.layers[0].attn.g_norm_swish_gate(x)
    close(y, (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt())
    assert model(some(1, 4))[0].isfinite().all()


# -- fla ---------------------------------------------------------------------------------------


def formula(shapes):
    """The weights of the facts: 0.3 sin(0.7 j^2 + i) for element j of tensor i, norms about 1."""
    weights = {}
    for i, (name, shape) in enumerate(shapes.items()):
        j = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        weights[name] = (0.3 * torch.sin(0.7 * j**2 + i) + ("norm" in name)).float().view(shape)
    return weights


@pytest.mark.parametrize("case", FACTS["cases"])
def test_flas_names_shapes_and_logits(case):
    """A state dict of fla's names and shapes loads strictly, and gives what fla's own kernels made of it."""
    facts = FACTS["cases"][case]
    model = LanguageModel(Config.from_dict(facts["config"]))
    assert {name: list(x.shape) for name, x in model.state_dict().items()} == facts["shapes"]
    model.load_state_dict(formula(facts["shapes"]), strict=True)
    with torch.no_grad():
        logits, _ = model(torch.tensor(FACTS["tokens"]))
        exact, _ = model.double()(torch.tensor(FACTS["tokens"]))
    theirs = torch.tensor(facts["logits"])
    assert (theirs - exact).abs().max() <= 2 * (logits - exact).abs().max() + 1e-5 * exact.abs().max()


def test_a_normalised_input_is_rounded_once_for_all_products(monkeypatch):
    """Under autocast the loss has the same bits as with a rounding for each product, and less is kept for gradients."""
    torch.manual_seed(0)
    model, tokens = LanguageModel(Config(**SMALL_MODEL | {"hidden_size": 64})), torch.randint(8, (2, 40))

    def step():
        kept = {}

        def keep(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens)[0]
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return loss, sum(kept.values()), gradients

    once = step()
    monkeypatch.setattr("gla_ref.models.language_model.lowered", lambda x: x)
    each = step()
    assert torch.equal(once[0], each[0]) and once[1] < each[1]
    for x, y in zip(once[2], each[2], strict=True):
        assert (x - y).norm() <= 2 * torch.finfo(torch.bfloat16).eps * y.norm()


@pytest.mark.parametrize("case", FACTS["cases"])
def test_configurations_there_and_back(case):
    facts = FACTS["cases"][case]["config"]
    config = Config.from_dict(facts)
    ours = config.to_dict()
    assert Config.from_dict(ours) == config
    names = {field.name for field in dataclasses.fields(Config)} & facts.keys()
    assert {name: facts[name] for name in names} == {name: ours[name] for name in names}
    assert ours["model_type"] == "gla"
    other = dataclasses.replace(config, tau=4.0)  # which fla's files cannot say
    assert other.to_dict()["model_type"] == "gla_ref" and Config.from_dict(other.to_dict()) == other
    loud = dataclasses.replace(config, conv_range=None)  # None is a choice here, and no lack of one
    assert Config.from_dict(loud.to_dict()) == loud != config
    attn = {"layers": [1], "num_heads": config.num_heads}
    hybrid = Config.from_dict(facts | {"attn": attn})  # fla's name for softmax attention in some of the layers
    mixers = tuple("softmax" if i == 1 else "gla" for i in range(config.num_hidden_layers))
    assert hybrid == dataclasses.replace(config, mixer=mixers)
    theirs = json.loads(json.dumps(hybrid.to_dict()))
    assert theirs["model_type"] == "gla" and theirs["attn"].items() >= attn.items()
    assert Config.from_dict(theirs) == hybrid


def test_a_missing_safetensors_says_which_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "gla_ref.models.checkpoints")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r'pip install "gla-ref\[models\]"'):
        importlib.import_module("gla_ref.models.checkpoints")


@pytest.mark.parametrize("mixer", thin(WAYS, "gla", "hybrid", "kda hybrid"))
def test_files_there_and_back(mixer, tmp_path):
    model = make(mixer, use_short_conv=True, dtype=torch.float32)
    checkpoints.save(model, tmp_path)
    read = checkpoints.load(tmp_path)
    assert read.config == model.config
    assert torch.equal(read(some(1, 5))[0], model(some(1, 5))[0])
    half = checkpoints.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and all(p.requires_grad for p in half.parameters())
    weights = checkpoints.load_file(tmp_path / "model.safetensors")
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    checkpoints.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="model.norm.weight"):
        checkpoints.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("compiled", ["model", "block", "mixer"])
def test_a_compiled_model_saves_plain_names(compiled, tmp_path):
    model = make(dtype=torch.float32)
    block = model.model.layers[0]
    if compiled == "block":
        model.model.layers[0] = torch.compile(block)
    if compiled == "mixer":
        block.attn = torch.compile(block.attn)
    checkpoints.save(torch.compile(model) if compiled == "model" else model, tmp_path)
    assert torch.equal(checkpoints.load(tmp_path)(some(1, 5))[0], make(dtype=torch.float32)(some(1, 5))[0])


def tied(model):
    model.lm_head.weight = model.model.embeddings.weight
    return model


def changed(model, part, wrap):
    setattr(model.model, part, wrap(getattr(model.model, part)))
    return model


LOGITS = r"a Tensor \[50, 16\]"
UNREADABLE = {
    "a wrapper": (torch.nn.DataParallel, "model: expected a LanguageModel, got DataParallel"),
    "the Transformer": (lambda m: m.model, "model: expected a LanguageModel, got Transformer"),
    "a wrapped part": (
        lambda m: changed(m, "norm", torch.nn.DataParallel),
        r"model: expected no tensor as model.norm.module.weight, got a Tensor \[16\]",
    ),
    "a parametrised part": (
        lambda m: changed(m, "embeddings", torch.nn.utils.parametrizations.weight_norm),
        "model: expected no tensor as model.embeddings.parametrizations.weight.original0, got a Tensor",
    ),
    "a part of another size": (
        lambda m: changed(m, "embeddings", lambda _: torch.nn.Embedding(60, 16)),
        r"model: expected a Tensor \[50, 16\] as model.embeddings.weight, got a Tensor \[60, 16\]",
    ),
    "no memory": (lambda m: m.to("meta"), f"model: expected {LOGITS} as lm_head.weight, got {LOGITS} on meta"),
    "tied weights": (tied, "\n.*share memory"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_load_would_not_read_is_refused_and_overwrites_nothing(kind, tmp_path):
    wrap, message = UNREADABLE[kind]
    checkpoints.save(make(dtype=torch.float32), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{message}"):
        checkpoints.save(wrap(make(dtype=torch.float32, tau=2.0)), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folders_model_is_its_own_file_or_those_of_its_index(tmp_path):
    model, other = make(dtype=torch.float32), make("softmax", dtype=torch.float32)
    checkpoints.save(model, tmp_path)
    for stray in ("model_best", "pytorch_model", "adapter", "model-00001-of-00002"):
        checkpoints.save_file(other.state_dict(), tmp_path / f"{stray}.safetensors")
    assert torch.equal(checkpoints.load(tmp_path).lm_head.weight, model.lm_head.weight)

    weights = model.state_dict()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="folder: expected model.safetensors or model.safetensors.index.json"):
        checkpoints.load(tmp_path)
    names = [name for name in weights if "layers.0" in name], [name for name in weights if "layers.0" not in name]
    index = {}
    for i, part in enumerate(names, 1):
        index |= dict.fromkeys(part, f"model-0000{i}-of-00002.safetensors")
        checkpoints.save_file({n: weights[n] for n in part}, tmp_path / index[part[0]])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(checkpoints.load(tmp_path)(some(1, 5))[0], model(some(1, 5))[0])


# -- errors ------------------------------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")
WRONG = {  # (field, value) of a configuration
    TypeError: [
        *(("hidden_size", 16.0), ("num_heads", True), ("tau", "16"), ("lower_bound", "-5"), ("use_short_conv", 1)),
        *(("qk_norm", 1), ("head_norm", None)),
    ],
    ValueError: [
        *(("vocab_size", 0), ("tau", NAN), ("lower_bound", 5.0), ("norm_eps", -1e-6), ("intermediate_size", 0)),
        *(("expand_k", 0.3), ("expand_k", 0.30001), ("expand_v", INFINITE)),
        *(("mixer", x) for x in ("rwkv", ("gla", "rwkv"), ("gla", "gla", "softmax"), ["gla", "softmax"])),
    ],
}


@pytest.mark.parametrize("kind, field, value", [(kind, *x) for kind, its in WRONG.items() for x in its])
def test_a_wrong_configuration_names_the_field(kind, field, value):
    with pytest.raises(kind, match=f"^{field}: expected"):
        Config(**SMALL_MODEL | {field: value})


@pytest.mark.parametrize("expand, heads, width", [(0.55, 5, 55), (0.57, 3, 57), (0.29, 29, 29), (1.1, 10, 110)])
def test_widths_that_floats_miss(expand, heads, width):
    config = Config(**SMALL_MODEL | {"hidden_size": 100, "expand_k": expand, "expand_v": expand, "num_heads": heads})
    assert config.key_size == config.value_size == width
    assert LanguageModel(config)(some(1, 3))[0].isfinite().all()
    with pytest.raises(ValueError, match=f"^expand_k: expected .* a multiple of num_heads = 7, got {width}$"):
        dataclasses.replace(config, num_heads=7)


def test_attention_needs_heads_of_an_even_size():
    with pytest.raises(ValueError, match="^num_heads: expected heads of an even size"):
        Config(**SMALL_MODEL | {"hidden_size": 18, "mixer": ("softmax", "gla")})


@pytest.mark.parametrize(
    "field, value",
    [("num_kv_heads", 1), ("tie_word_embeddings", True), ("hidden_act", "powlu"), ("rope_theta", 1e4)]
    + [("model_type", "mamba2")]
    + [("attn", x) for x in ("full", {}, {"layers": 1}, {"layers": [0], "num_heads": 3})]
    + [("attn", {"layers": [0], "window_size": 8})],
)
def test_what_flas_file_asks_for_and_is_not_here_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        Config.from_dict(FACTS["cases"]["default"]["config"] | {field: value})


TOKENS, INTEGERS, COUNTING = some(1, 4), "an int32 or int64", "at least one that counts"
RANGE = "0 to vocab_size - 1 = 49, got"
WRONG_CALLS = [
    (lambda m: m(TOKENS.float()), f"tokens: expected {INTEGERS}"),
    (lambda m: m([[1, 2]]), "tokens: .* got list"),
    (lambda m: m(some(4)), r"tokens: expected shape \[B T\]"),
    (lambda m: m(some(1, 0)), "tokens: .* at least one token"),
    (lambda m: m(torch.tensor([[1, 50]])), f"tokens: expected {RANGE} 50"),
    (lambda m: m(torch.tensor([[1, -1]])), f"tokens: expected {RANGE} -1"),
    (lambda m: m.loss(TOKENS, some(1, 3)), r"targets: expected shape \[1, 4\]"),
    (lambda m: m.loss(TOKENS, TOKENS + 0.7), f"targets: expected {INTEGERS} .*, got torch.float32"),
    (lambda m: m.loss(TOKENS, TOKENS.numpy()), f"targets: expected {INTEGERS} .*, got ndarray"),
    (lambda m: m.loss(TOKENS, torch.full((1, 4), 50)), f"targets: expected {RANGE} 50"),
    (lambda m: m.loss(TOKENS, TOKENS.to("meta")), "targets: expected device cpu as for tokens, got meta"),
    (lambda m: m.loss(some(2, 1)), "targets: expected some where sequences have one token"),
    (lambda m: m.loss(some(1, 2), cu_seqlens=torch.tensor([0, 1, 2])), f"targets: expected {COUNTING}"),
    (lambda m: m.loss(TOKENS, torch.full((1, 4), -100)), f"targets: expected {COUNTING}"),
    (lambda m: m(TOKENS, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens: expected"),
    (lambda m: m.loss(some(1, 9), cu_seqlens=torch.tensor([0, 99, 9])), "cu_seqlens: expected to rise"),
    (lambda m: m.loss(some(1, 9), cu_seqlens=torch.tensor([0.0, 9.0])), f"cu_seqlens: expected {INTEGERS}"),
    (lambda m: m(some(2, 9), cu_seqlens=torch.tensor([0, 9])), "cu_seqlens: packed sequences need"),
    (lambda m: m.generate([some(2), some(0)], 1), r"prompts\[1\]: .* at least one token"),
    (lambda m: m.generate("text", 1), "prompts: expected .*, got str"),
    (lambda m: m.generate(some(4), 1), r"prompts: expected shape \[N T\]"),
    (lambda m: m.generate([some(2), some(2) + 50], 1), rf"prompts\[1\]: expected {RANGE}"),
    (lambda m: m.generate([], 1), "prompts: expected at least one, got none"),
    (lambda m: m.generate(TOKENS, 0), "new_tokens: expected"),
    (lambda m: m.generate(TOKENS, 1, chunk=0), "chunk: expected"),
    *(
        (lambda m, x=x: m.generate(TOKENS, 1, temperature=x), "temperature: expected")
        for x in (-1.0, 1e-45, NAN, "1", None, True)
    ),
    (lambda m: m(TOKENS, state=m(TOKENS)[1][:1]), "state: expected a list of 2 layers' states, got 1 of them"),
    (lambda m: m(TOKENS, state=m(TOKENS)[1][0]), "state: expected a list of 2 layers' .* got LayerState"),
    (lambda m: m.loss(some(2, 4), state=m(TOKENS)[1]), r"state\[0\].S: expected 2 sequences"),
    (lambda m: m.generate(TOKENS, 1, state=m(some(2, 4))[1]), r"state\[0\].S: expected 1 sequences"),
]


@pytest.mark.parametrize("call, message", WRONG_CALLS)
def test_a_wrong_call_names_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(make())


CONV, FOUR = {"use_short_conv": True}, {"num_heads": 4}


@pytest.mark.parametrize(
    "model, other, message",
    [
        (("gla", {}), ("gla", CONV), r"\[0\]: .* no short convolutions"),
        (("hybrid", CONV), ("gla", CONV), r"\[1\]: expected that of a model with no short convolutions"),
        (("gla", {}), ("gla", FOUR), r"\[0\].S: expected shape"),
        (("softmax", {}), ("softmax", FOUR), r"\[0\].S.k: expected shape \[N, T, 2, 8\], got \[1, 4, 4, 4\]"),
        (("softmax", {}), ("linear", {}), r"\[0\].S: expected a Cache, as mixer 'softmax' returns, got"),
        (("gla", {}), ("softmax", {}), r"\[0\].S: expected a Tensor, as mixer 'gla' returns, got"),
        (("linear", {}), ("softmax", {}), r"\[0\].S: expected a Tensor, as mixer 'linear' returns, got"),
        (("hybrid", {}), ("gla", {}), r"\[1\].S: expected a Cache, as mixer 'softmax' returns, got Tensor"),
    ],
)
def test_the_state_of_another_model_is_named(model, other, message):
    (mixer, fields), (its, its_fields) = model, other
    _, state = make(its, **its_fields)(TOKENS)
    with pytest.raises((TypeError, ValueError), match=f"^state{message}"):
        make(mixer, **fields)(TOKENS, state=state)


@pytest.mark.parametrize(
    "message, change",
    [
        (": expected a LayerState, got tuple", tuple),
        (".S: expected a Tensor.*, got int", lambda x: x._replace(S=0)),
        (r".S: expected shape .*, got \[\]", lambda x: x._replace(S=torch.tensor(1.0))),
        (r".S: expected shape \[N, 2, 4, 8\], got", lambda x: x._replace(S=x.S.mT)),
        (
            r".conv of q: expected shape \[N, 3, 8\], got \[1, 2, 8\]",
            lambda x: x._replace(conv=tuple(y[:, 1:] for y in x.conv)),
        ),
    ],
)
def test_the_layer_whose_state_is_wrong_is_named(message, change):
    model = make(use_short_conv=True)
    first, second = model(TOKENS)[1]
    with pytest.raises((TypeError, ValueError), match=rf"^state\[1\]{message}"):
        model(TOKENS, state=[first, change(second)])


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1.0, 1e30, float("inf")])
def test_every_temperature_draws_tokens(temperature):
    """Also where logits over the temperature leave float32's range."""
    model = make(dtype=torch.float32)
    model.lm_head.weight.data.mul_(1e6)
    drawn, _ = model.generate(some(1, 4), 5, temperature=temperature)
    assert ((drawn >= 0) & (drawn < 50)).all()
    assert temperature > 1 or torch.equal(drawn, model.generate(some(1, 4), 5)[0])


@pytest.mark.parametrize("mixer", ["softmax", "linear", "hybrid"])
def test_values_are_not_looked_at_where_there_are_none(mixer):
    """Meta and fake tensors, vmap and make_fx; a token outside the vocabulary is found on the CPU beside them."""
    model, tokens = make(mixer, dtype=torch.float32, num_hidden_layers=2), some(2, 5)
    exact = [model.loss(tokens[i : i + 1])[0] for i in range(2)]
    mapped = torch.func.vmap(lambda t: model.loss(t[None])[0])(tokens)
    close(mapped, torch.stack(exact), 1e-5)
    traced = make_fx(lambda t: model.loss(t)[0])(tokens)
    close(traced(tokens), model.loss(tokens)[0], 1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model.loss(mode.from_tensor(tokens))[0].shape == ()
    assert copy.deepcopy(model).to("meta").loss(tokens.to("meta"))[0].is_meta
    with pytest.raises(ValueError, match="^tokens: expected 0 to"):
        model(tokens + 50)


# -- which form --------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", FORMS)
def test_kernels_on_a_gpu_and_references_elsewhere(mechanism):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    chosen = [_forms.choose(mechanism, x, torch.bfloat16, T, False) for x in (cpu, gpu) for T in (1, 100)]
    assert all(name in FORMS[mechanism] for name in chosen)
    assert not any(name.startswith("triton") for name in chosen[:2])
    assert all(name.startswith("triton") for name in chosen[2:])
    assert _forms.choose("gla", gpu, torch.bfloat16, 1, True) == "triton"  # the kernel for one token has no gradient
    exact = [_forms.choose(mechanism, gpu, torch.float64, T, False) for T in (1, 100)]
    assert not any(name.startswith("triton") for name in exact)  # no kernel computes in float64


@pytest.mark.deep
@ways
@pytest.mark.skipif(CUDA, reason="in Triton's interpreter; on a GPU test_on_a_gpu holds the same")
def test_kernels_in_the_interpreter(mixer, monkeypatch):
    """The kernels' way through the model: same loss, gradients and text; compiled without a break."""
    pytest.importorskip("triton", reason="Triton is not installed")
    layers = len(HYBRIDS.get(mixer, [mixer]))
    model, tokens = make(mixer, dtype=torch.float32, num_hidden_layers=layers), some(1, 20)

    def results():
        model.zero_grad()
        loss, _ = model.loss(tokens)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    prompts = [some(5), some(11)[::2], some(13)]
    plain, (text, _) = results(), model.generate(prompts, 3, chunk=4)
    choose, cuda = _forms.choose, torch.device("cuda")
    monkeypatch.setattr(_forms, "choose", lambda mechanism, device, *rest: choose(mechanism, cuda, *rest))
    for x, y in zip(results(), plain, strict=True):
        close(x, y, 1e-4 * max(1, y.abs().max()))
    assert torch.equal(model.generate(prompts, 3, chunk=4)[0], text)
    if mixer in ("gla", "softmax", "hybrid"):
        torch.compiler.reset()
        close(torch.compile(model.loss, fullgraph=True, backend="aot_eager")(tokens)[0], plain[0], 1e-5)


@pytest.mark.parametrize("T, N, ends", [(1, 2, None), (2, 2, None), (37, 2, None), (37, 3, (0, 5, 5, 37))])
def test_a_compiled_convolution_is_the_same(T, N, ends, monkeypatch):
    """Compiled it is products instead of a convolution: outputs, pasts and gradients, packed too."""

    def refuse(*args):
        raise AssertionError("expected products, got a convolution")

    torch.manual_seed(0)
    conv, inputs = ShortConvolution(6, 4).double(), [torch.randn(N if ends is None else 1, T, 6), torch.randn(N, 3, 6)]
    ends = None if ends is None else torch.tensor(ends)

    def results(forward):
        x, past = (z.double().requires_grad_() for z in inputs)
        y, after = forward(x, past, ends)
        (y.square().sum() + after.sin().sum()).backward()
        return [y, after, x.grad, past.grad, *(p.grad.clone() for p in conv.parameters()), conv.zero_grad()][:-1]

    torch.compiler.reset()
    plain = results(conv)
    monkeypatch.setattr(torch.nn.Conv1d, "forward", refuse)
    compiled = results(torch.compile(conv, fullgraph=True, backend="aot_eager"))
    for a, b in zip(compiled, plain, strict=True):
        close(a, b, 1e-12)


@pytest.mark.gpu
@ways
def test_on_a_gpu(mixer, monkeypatch):
    """Float32 with exact products: loss, gradients, packed documents, generated tokens, compiled without a break."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of convolutions
    torch.compiler.reset()  # a process that has compiled eight models compiles no more
    fields = {"hidden_size": 64, "use_short_conv": True, "tau": 16.0, "initializer_range": 0.1}
    model, tokens = make(mixer, dtype=torch.float32, **fields), some(1, 200)
    ends = torch.tensor([0, 60, 60, 200])
    there = make(mixer, dtype=torch.float32, **fields).cuda()

    def results(model, loss, device):
        model.zero_grad()
        value, _ = loss(tokens.to(device), cu_seqlens=ends.to(device))
        value.backward()
        return [value.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    wanted = results(model, model.loss, "cpu")
    for way in (there.loss, torch.compile(there.loss, fullgraph=True)):
        for x, y in zip(results(there, way, "cuda"), wanted, strict=True):
            close(x, y, 1e-3 * max(1e-3, y.abs().max()))
    prompts = [some(5), some(40)[::2], some(13)]
    written, _ = there.generate([p.cuda() for p in prompts], 8, chunk=8)
    assert torch.equal(written.cpu(), model.generate(prompts, 8, chunk=8)[0])


@pytest.mark.gpu
@every
def test_a_first_training_step_on_a_gpu(mixer, monkeypatch):
    """As MQAR trains: K = 32, V = 64, bfloat16 by autocast. Kernels are as near float64 as references are."""
    config = Config(vocab_size=512, hidden_size=128, num_hidden_layers=2, num_heads=2, mixer=mixer)
    tokens = torch.randint(512, (40, 64), generator=torch.Generator().manual_seed(1))

    def step(device, dtype, forms=None):
        """The loss, all gradients, and the loss after a step of the optimiser."""
        torch.manual_seed(0)
        model = LanguageModel(config).to(device, dtype)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda"), []
        with monkeypatch.context() as patch:
            if forms:
                patch.setattr(_forms, "choose", lambda mechanism, *_: _forms.REFERENCE.get(mechanism, forms))
            for _ in range(2):
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    losses.append(model.loss(tokens.to(device))[0])
                if len(losses) == 1:
                    losses[0].backward()
                    optimizer.step()
        grads = [p.grad.double().cpu() for p in model.parameters()]
        return [x.detach().double().cpu() for x in losses], grads

    def far(found, exact):
        """The largest error of a loss, and of a gradient over the largest entry of its parameter's."""
        losses, grads = (list(zip(*x, strict=True)) for x in zip(found, exact, strict=True))
        worst = max(((x - y).abs().max() / y.abs().max()).item() for x, y in grads)
        return max((x - y).abs().item() for x, y in losses), worst

    exact = step("cpu", torch.float64)
    assert exact[0][1] < exact[0][0]
    kernels, references = (far(step("cuda", torch.float32, forms), exact) for forms in (None, "chunkwise"))
    assert all(x <= 2 * y + 1e-3 for x, y in zip(kernels, references, strict=True)), (kernels, references)
