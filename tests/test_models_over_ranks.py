"""A language model with its sequences split over processes: loss and gradients are those of one process."""

import re

import pytest
import torch
from cases import SMALL_MODEL
from ranks import Pool
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gla_ref.models import MIXERS, Config, LanguageModel
from gla_ref.over_ranks.language_model import LossOverRanks

T = 40
PACKED = [0, 3, 9, 9, 20, 30, 40, 40]  # of two equal pieces one border is a boundary; of three both are within
pytestmark = pytest.mark.deep  # one case is quick: that in test_context_parallel.py, which has processes already
SPLITS = {1: [40], 2: [20, 20], 3: [11, 3, 26]}
LINEAR = [m for m in MIXERS if m != "softmax"]
CLOSE = 1e-9  # in float64, relative to the largest entry of a gradient


@pytest.fixture(scope="module")
def pool():
    pool = Pool(3)
    yield pool
    pool.close()


def make(mixer, **fields):
    torch.manual_seed(0)
    return LanguageModel(Config(**SMALL_MODEL | {"mixer": mixer, "use_short_conv": True} | fields)).double()


def words(B=2, seed=1):
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


def alone(mixer, tokens, **options):
    """The loss of one process and its gradients by name."""
    model = make(mixer)
    loss, _ = model.loss(tokens, **options)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def piece(rank, group, mixer, tokens, targets, cu, lengths, checkpointed=False, **fields):
    """The loss and the gradients that one rank finds."""
    model, a = make(mixer, **fields), sum(lengths[:rank])
    model.model.gradient_checkpointing = checkpointed
    own = slice(a, a + lengths[rank])
    targets = None if targets is None else targets[:, own]
    loss = LossOverRanks(model, group)(tokens[:, own], targets, cu_seqlens=cu, lengths=lengths)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def hold(parts, wanted):
    """Every rank has the loss; the mean of the ranks' gradients is the gradient."""
    loss, gradients = wanted
    for found, _ in parts:
        assert abs(found - loss) < CLOSE
    for name, exact in gradients.items():
        mean = sum(g[name] for _, g in parts) / len(parts)
        assert (mean - exact).abs().max() < CLOSE * exact.abs().max(), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", SPLITS)
@pytest.mark.parametrize("mixer", LINEAR)
def test_split_sequences_are_whole_ones(pool, mixer, n, packed):
    tokens, cu = (words(1), torch.tensor(PACKED)) if packed else (words(), None)
    hold(pool.ask(n, piece, mixer, tokens, None, cu, SPLITS[n]), alone(mixer, tokens, cu_seqlens=cu))


@pytest.mark.parametrize("ends", [[0, 20, 40], [0, 19, 40], [0, 21, 40], [0, 18, 22, 40], [0, 0, 20, 20, 40], [0, 40]])
def test_documents_beside_a_border(pool, ends):
    tokens, cu = words(1), torch.tensor(ends)
    hold(pool.ask(2, piece, "gla", tokens, None, cu, [20, 20]), alone("gla", tokens, cu_seqlens=cu))


def test_targets_of_the_caller(pool):
    """On one rank none counts."""
    tokens, targets = words(), words(seed=2)
    targets[:, :11], targets[0, 20:] = -100, -100
    hold(pool.ask(3, piece, "gla", tokens, targets, None, SPLITS[3]), alone("gla", tokens, targets=targets))


def checkpointed(rank, group, *args):
    return piece(rank, group, *args, checkpointed=True)


def test_gradient_checkpointing(pool):
    tokens = words()
    hold(pool.ask(2, checkpointed, "gla", tokens, None, None, [20, 20]), alone("gla", tokens))


# Two dimensions: sequences over dp, tokens over cp.


def wrapped(rank, group, kind, shape, tokens):
    """The gradients after DDP or FSDP2 has averaged them over both dimensions."""
    mesh = dist.DeviceMesh("cpu", torch.arange(2).view(shape), mesh_dim_names=("dp", "cp"))
    model = make("gla")
    loss = LossOverRanks(model, mesh["cp"])
    if kind == "ddp":
        loss = DistributedDataParallel(loss, process_group=group)
    else:
        from torch.distributed.fsdp import fully_shard

        flat = mesh["dp", "cp"]._flatten()
        for layer in model.model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(loss, mesh=flat)
    dp, cp = mesh.get_coordinate()
    value = loss(tokens.chunk(shape[0])[dp].chunk(shape[1], 1)[cp])
    value.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    if kind == "fsdp2":
        grads = {name: g.full_tensor() for name, g in grads.items()}
    dist.all_reduce(value.detach(), group=group)
    return value.detach() / 2, grads


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_with_data_parallelism(kind, shape):
    pool = Pool(2)  # a mesh is of all processes
    tokens = words()
    hold(pool.ask(2, wrapped, kind, shape, tokens), alone("gla", tokens))
    pool.close()


# What goes wrong.


def other(rank, group, change):
    given = dict(tokens=words()[:, 20 * rank : 20 * rank + 20]) | (change if rank else {})
    mixer, tokens = given.pop("mixer", "gla"), given.pop("tokens")
    return LossOverRanks(make(mixer), group)(tokens, **given)


SAME = "expected the same on every rank, got"
FAULTS = {
    "thirds": (dict(tokens=words()[:, :13]), rf"lengths: {SAME} \[20, 20\] on rank 0 and \[13, 13\] on rank 1"),
    "one sequence": (
        dict(tokens=words(1)[:, :20]),
        rf"tokens: {SAME} \[2, T\] torch.int64 on cpu on rank 0 and \[1, T\] torch.int64 on cpu on rank 1$",
    ),
    "another model": (dict(mixer="retnet"), f"config: {SAME} .*gla"),
    "targets": (dict(targets=words()[:, :20]), f"targets: {SAME} None on rank 0"),
    "short targets": (dict(targets=words()[:, :19]), r"targets: expected shape \[2, 20\] as of tokens, got \[2, 19\]"),
    "a short piece": (
        dict(tokens=words()[:, :2]),
        r"lengths: expected 2 token counts of at least 3 \(a convolution sees 4\), .* got \[2, 2\]",
    ),
    "lengths": (dict(lengths=[19, 21]), "lengths: expected 20 for rank 1, the length of tokens, got 21"),
    "no tokens": (dict(tokens=words().float()), "tokens: expected an int32 or int64"),
    "boundaries": (dict(cu_seqlens=torch.tensor([0, 40])), "cu_seqlens: .* batch size B = 1, got B = 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_differ(pool, fault):
    change, message = FAULTS[fault]
    group = pool.group(fault, 2)
    for ok, error in pool.tell(group, other, change):
        assert not ok and re.search(message, error[0]), error


def with_softmax(rank, group):
    LossOverRanks(make(("gla", "softmax")), group)(words()[:, 20 * rank : 20 * rank + 20])


def test_softmax_is_refused(pool):
    for ok, error in pool.tell(pool.group("2", 2), with_softmax):
        assert not ok and re.search("^mixer: expected one with a state.*'softmax' in layer 1", error[0]), error
