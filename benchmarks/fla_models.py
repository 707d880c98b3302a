"""fla's GLAForCausalLM and our LanguageModel with the same weights: are they one model?

    python benchmarks/fla_models.py --facts      # needs fla, no GPU; writes tests/fla_gla.json, which the tests read
    python benchmarks/fla_models.py              # on a GPU; writes results/<gpu>-models.json

The facts are fla's configuration as JSON, the names and shapes of its state dict, its numbers of parameters at two
widths, and the logits of a small model whose weights are a formula, made by its own kernels in Triton's interpreter. On
a GPU random weights go from fla to us and back through files, and both run in float32 and bfloat16: logits of whole
sequences, logits step by step from a state, and the gradients of the loss. The truth is our model in float64 on the CPU
with the same (rounded) weights. An error is max |x - x*| / rms(x*). Its budget is 2 x the worst error of seven emulated
runs + 4 eps: our references in the same dtype, operands of products rounded to it, once in the usual order of sums and
six times with the terms of every product shuffled.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # before Triton is imported: no TF32 in fla's kernels
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # fla's own kernels, whatever else is installed

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parent / "src")]

from gla_ref import results
from gla_ref.models import Config, LanguageModel
from gla_ref.rounding import Products, budget, error

FACTS = ROOT.parent / "tests" / "fla_gla.json"
SMALL = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
CASES = {"default": {}, "short_conv": {"use_short_conv": True, "conv_size": 3}}
LARGE = {"vocab_size": 1000, "hidden_size": 1024, "num_hidden_layers": 4, "num_heads": 4}
TOKENS, STEPS = 300, 20  # of a sequence; how many of them one at a time
ORDERS = 7  # of sums, in emulated runs
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def formula(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Weights that anyone can make again, in float32: 0.3 sin(0.7 j^2 + i) for element j of tensor i, norms about 1."""
    modules = {}
    for i, (name, shape) in enumerate(shapes.items()):
        j = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        modules[name] = (0.3 * torch.sin(0.7 * j**2 + i) + ("norm" in name)).float().view(shape)
    return modules


def fla_model(**fields):
    """fla's model and its configuration as it writes it into config.json."""
    from fla.models import GLAConfig, GLAForCausalLM

    config = GLAConfig(**fields)
    return GLAForCausalLM(config), json.loads(config.to_json_string())


def search_nothing() -> None:
    """Autotuners take their first configuration: the interpreter has no clock, and the GPU's time is ours."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def first_only(self, *args, **options):
        init(self, *args, **options)
        self.configs = self.configs[:1]

    Autotuner.__init__ = first_only


def write_facts() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    search_nothing()
    tokens = torch.arange(40).view(2, 20) ** 2 % SMALL["vocab_size"]
    facts = {"versions": {name: version(name) for name in ("flash-linear-attention", "transformers")}, "cases": {}}
    for name, more in CASES.items():
        model, config = fla_model(**SMALL, **more)
        shapes = {key: list(x.shape) for key, x in model.state_dict().items()}
        model.load_state_dict(formula(shapes), strict=True)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        facts["cases"][name] = {"config": config, "shapes": shapes, "logits": logits.tolist()}
    facts["tokens"], facts["parameters"] = tokens.tolist(), {}
    for width in (1024, 2048):
        with torch.device("meta"):
            facts["parameters"][width] = fla_model(hidden_size=width)[0].num_parameters()
    FACTS.write_text(json.dumps(facts) + "\n")
    print(f"wrote {FACTS}")


def whole(model, tokens):
    """Logits of our model or fla's."""
    output = model(tokens)
    return output[0] if isinstance(model, LanguageModel) else output.logits


@torch.no_grad()
def stepwise(model, tokens):
    """Logits of the last STEPS tokens, one at a time, behind a state of the others."""
    before, after = tokens[:, :-STEPS], tokens[:, -STEPS:].split(1, 1)
    if isinstance(model, LanguageModel):
        _, state = model(before)
        steps = []
        for token in after:
            logits, state = model(token, state=state)
            steps.append(logits)
        return torch.cat(steps, 1)
    cache = model(before, use_cache=True).past_key_values
    steps = []
    for token in after:
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, 1)


def measured(model, tokens) -> dict[str, torch.Tensor]:
    """Everything that is compared, in float64 on the CPU."""
    model.train()
    model.zero_grad()
    logits = whole(model, tokens)
    targets = tokens[:, 1:].flatten()
    wide = logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    torch.nn.functional.cross_entropy(wide, targets).backward()
    results = {"logits": logits, "steps": stepwise(model.eval(), tokens)}
    results |= {f"d {name}": p.grad for name, p in model.named_parameters()}
    return {name: x.detach().double().cpu() for name, x in results.items()}


class Shuffled(Products):
    """Operands of products in a dtype, and their terms added in an order drawn by `seed`; 0 keeps the usual order."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__(self.multiply)
        self.dtype, self.seed, self.rng = dtype, seed, torch.Generator().manual_seed(seed)

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = (z.to(self.dtype).to(z.dtype) for z in (x, y))
        order = self.order(x)
        return x[..., order] @ (y[..., order, :] if y.ndim > 1 else y[order])

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and self.seed:
            x, weight, *more = args
            order = self.order(x)
            args = x[..., order], weight[:, order], *more
        return super().__torch_function__(function, types, args, kwargs)

    def order(self, x: torch.Tensor) -> torch.Tensor:
        """An order of the last axis."""
        n = x.shape[-1]
        return torch.randperm(n, generator=self.rng) if self.seed else torch.arange(n)


def compare(gpu: str) -> list[dict]:
    """A record for each dtype and quantity; of the gradients, the one that is nearest to its budget."""
    search_nothing()
    torch.backends.cudnn.allow_tf32 = False  # of convolutions
    records = []
    for case, more in CASES.items():
        theirs, config = fla_model(**LARGE, **more, fuse_cross_entropy=False, initializer_range=0.1)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            from gla_ref.models.checkpoints import load, save

            ours = load(folder)
            save(ours, folder)
            from fla.models import GLAForCausalLM

            back = GLAForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(x, back[name]) for name, x in theirs.state_dict().items()), "there and back"
        assert ours.config == Config.from_dict(config)
        tokens = torch.randint(LARGE["vocab_size"], (2, TOKENS))
        for name, dtype in DTYPES.items():
            rounded = copy.deepcopy(ours).to(dtype)
            exact = measured(copy.deepcopy(rounded).double(), tokens)
            emulated = []
            for seed in range(ORDERS):
                with Shuffled(dtype, seed):
                    run = measured(copy.deepcopy(rounded), tokens)
                emulated.append({quantity: error(run[quantity], x) for quantity, x in exact.items()})
            found = {
                "ours": measured(rounded.cuda(), tokens.cuda()),
                "fla": measured(copy.deepcopy(theirs).to(dtype).cuda(), tokens.cuda()),
            }
            rows = []
            for quantity, x in exact.items():
                allowed = budget(max(run[quantity] for run in emulated), dtype)
                errors = {who: error(y[quantity], x) for who, y in found.items()}
                rows.append({"case": case, "dtype": name, "quantity": quantity, "budget": allowed, **errors})
            gradients = [row for row in rows if row["quantity"].startswith("d ")]
            worst = max(gradients, key=lambda row: row["ours"] / row["budget"])
            for row in [row for row in rows if row not in gradients] + [worst]:
                row["passed"] = row["ours"] <= row["budget"]
                print(row, flush=True)
                records.append(row)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", action="store_true", help="write tests/fla_gla.json")
    if parser.parse_args().facts:
        write_facts()
        return
    torch.manual_seed(0)
    gpu = torch.cuda.get_device_name()
    records = compare(gpu)
    environment = results.environment(gpu, ["flash-linear-attention", "fla-core", "transformers"])
    results.write(results.file(f"{gpu} models"), environment, "models", records)
    sys.exit(not all(row["passed"] for row in records))


if __name__ == "__main__":
    main()
