"""The settings of a language model as one checked record, read from JSON and written to it (chapter 17).

Fields have the names of flash-linear-attention 0.6.0 (its GLAConfig) where it has the field.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import NoneType
from typing import NewType, get_args, get_origin, get_type_hints

__all__ = ["Config", "check_fields"]

Negative = NewType("Negative", float)

MIXER_NAMES = ("softmax", "linear", "retnet", "scalar", "mamba2", "gla", "gated_delta", "kda")  # classes: mixers.py
# fields of fla's files that we ignore: settings that change no result, and bookkeeping of transformers
WITHOUT_EFFECT = set(
    "attn_mode fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy max_position_embeddings "
    "share_conv_kernel use_cache bos_token_id eos_token_id pad_token_id architectures auto_map dtype model_type "
    "torch_dtype transformers_version chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions "
    "output_hidden_states problem_type return_dict _name_or_path".split()
)
# fields of fla's files that would change a result, with the values that we support
NEUTRAL = {
    "attnres_block_size": (None,),
    "clamp_min": (None,),
    "elementwise_affine": (True,),
    "feature_map": (None,),
    "fuse_norm": (True,),  # False would rename the norm in the state dict
    "hidden_act": ("swish",),
    "tie_word_embeddings": (False,),
    "use_gk": (True,),
    "use_gv": (False,),
    "use_l2warp": (False,),
    "use_output_gate": (True,),
}
# fla fixes these fields and does not write them (weights that are loaded need no start)
FLA_HAS = {"mixer": "gla", "gate_rank": 16, "tau": 16.0, "head_norm": "rms", "conv_range": 0.02, "output_range": None}
FLA_HAS |= {"lower_bound": None, "qk_norm": False}


@dataclass(frozen=True)
class Config:
    """Settings of a :class:`gla_ref.models.language_model.LanguageModel`.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width d of the residual stream.
        num_hidden_layers: number of blocks.
        num_heads: heads H of a mixer.
        mixer: a key of :data:`gla_ref.models.mixers.MIXERS`, or a tuple of one for each layer: a hybrid.
        expand_k: H K / d of all mixers except softmax, which has 1.
        expand_v: H V / d of all mixers except softmax, which has 1.
        gate_rank: rank of the gates of GLA (the paper: 16) and KDA (as many as a head has values).
        tau: temperature of the gates of GLA and its scalar kin (the paper: 16).
        lower_bound: a negative number that KDA's log gates stay above (-5 in models); None: any gate up to 0.
        head_norm: the norm of a head's output: "rms", as in the published checkpoints, or "layer", as in the paper.
        use_short_conv: whether a causal convolution and silu follow the projections of q, k and v; not in a hybrid's
            layers of softmax attention, as in fla.
        conv_size: tokens that the convolution sees.
        hidden_ratio: sets the width of the MLP if `intermediate_size` is None.
        intermediate_size: the width of the MLP; None: 2/3 of hidden_ratio d, rounded up to a multiple of 256.
        qk_norm: whether softmax attention takes RMSNorms of its heads' queries and keys.
        norm_eps: added to mean squares before the root.
        initializer_range: standard deviation of the weights at the start.
        conv_range: the same for convolutions; None: PyTorch's start, uniform within conv_size^-0.5. With fla's 0.02,
            q, k and v shrink so far that a head's output is far below norm_eps^0.5 (chapter 19).
        output_range: the same for the mixers' W_O; None: initializer_range. A small one lets mixers start quietly
            (chapter 19).

    Raises:
        TypeError, ValueError: a field does not fit; the message names it.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 4
    mixer: str | tuple[str, ...] = "gla"
    expand_k: float = 0.5
    expand_v: float = 1.0
    gate_rank: int = 16
    tau: float = 16.0
    lower_bound: Negative | None = None
    head_norm: str = "rms"
    use_short_conv: bool = False
    conv_size: int = 4
    hidden_ratio: float = 4
    intermediate_size: int | None = None
    qk_norm: bool = False
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    conv_range: float | None = 0.02
    output_range: float | None = None

    def __post_init__(self):
        check_fields(self)
        hybrid = isinstance(self.mixer, tuple)
        if hybrid and len(self.mixer) != self.num_hidden_layers:
            raise ValueError(f"mixer: expected one for each of {self.num_hidden_layers} layers, got {self.mixer!r}")
        mixers = self.mixer if hybrid else (self.mixer,)
        for name, found, choices in (("mixer", mixers, MIXER_NAMES), ("head_norm", [self.head_norm], ("rms", "layer"))):
            if wrong := [x for x in found if x not in choices]:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {wrong[0]!r}")
        if "softmax" in mixers and self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"num_heads: expected heads of an even size, which softmax attention rotates, "
                f"got {self.num_heads} for hidden_size = {self.hidden_size}"
            )
        for name in () if {*mixers} == {"softmax"} else ("expand_k", "expand_v"):
            width = self.hidden_size * getattr(self, name)  # 55.00000000000001 for 100 * 0.55
            if not math.isclose(width, round(width)) or round(width) % self.num_heads:
                raise ValueError(
                    f"{name}: expected hidden_size * {name} a multiple of num_heads = {self.num_heads}, got {width:g}"
                )

    @property
    def key_size(self) -> int:
        """H K of all mixers except softmax."""
        return round(self.hidden_size * self.expand_k)

    @property
    def value_size(self) -> int:
        """H V of all mixers except softmax."""
        return round(self.hidden_size * self.expand_v)

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or 256 * math.ceil(int(self.hidden_size * self.hidden_ratio * 2 / 3) / 256)

    def layers(self) -> list[Config]:
        """The settings of each layer, with one mixer."""
        if isinstance(self.mixer, str):
            return [self] * self.num_hidden_layers
        conv = self.use_short_conv
        return [dataclasses.replace(self, mixer=x, use_short_conv=conv and x != "softmax") for x in self.mixer]

    def state_size(self, T: int) -> int:
        """Numbers that a model knows a sequence by after T tokens: of all layers, convolutions included."""
        total, d = 0, self.hidden_size
        for layer in self.layers():
            soft = layer.mixer == "softmax"
            keys, values = (d, d) if soft else (self.key_size, self.value_size)
            total += T * (keys + values) if soft else keys * values // self.num_heads
            total += (self.conv_size - 1) * (2 * keys + values) if layer.use_short_conv else 0
        return total

    def to_dict(self) -> dict:
        """Return a dict for JSON: one that fla's GLAConfig reads if fla has the model, else model_type "gla_ref"."""
        fields = dataclasses.asdict(self)
        hybrid = isinstance(self.mixer, tuple) and {*self.mixer} == {"gla", "softmax"}
        if any(fields[name] != value for name, value in FLA_HAS.items() if not (hybrid and name == "mixer")):
            return {"model_type": "gla_ref", **fields}
        theirs = {name: x for name, x in fields.items() if name not in FLA_HAS}
        if hybrid:
            soft = [i for i, name in enumerate(self.mixer) if name == "softmax"]
            theirs["attn"] = softmax_of_fla(soft, self.num_heads)
        return {"architectures": ["GLAForCausalLM"], "model_type": "gla", **theirs}

    @classmethod
    def from_dict(cls, fields: dict) -> Config:
        """The reverse of :meth:`to_dict`; reads fla's config.json too.

        Raises:
            TypeError, ValueError: a field is unknown, or has a value that we do not support; the message names it.
        """
        if fields.get("model_type", "gla") not in ("gla", "gla_ref"):
            raise ValueError(f"model_type: expected 'gla' or 'gla_ref', got {fields['model_type']!r}")
        own = get_type_hints(cls)
        H, attn = fields.get("num_heads", cls.num_heads), fields.get("attn")
        layers = attn.get("layers") if isinstance(attn, dict) else None
        soft = softmax_of_fla(layers if isinstance(layers, list) else [], H)
        neutral = NEUTRAL | {"num_kv_heads": (None, H), "attn": (None, soft)}
        for name, x in fields.items():
            x = {**soft, "layers": None, **x} if name == "attn" and isinstance(x, dict) else x
            if name in neutral and x not in neutral[name]:
                raise ValueError(f"{name}: expected {' or '.join(map(repr, neutral[name]))}, got {x!r}")
            if name not in WITHOUT_EFFECT | set(own) | set(neutral):
                raise ValueError(f"{name}: expected a field of Config or of fla's GLAConfig, got {x!r}")
        ours = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items() if name in own}
        if layers is not None:
            depth = fields.get("num_hidden_layers", cls.num_hidden_layers)
            ours["mixer"] = tuple("softmax" if i in layers else "gla" for i in range(depth))
        return cls(**{name: x for name, x in ours.items() if x is not None or NoneType in get_args(own[name])})


def softmax_of_fla(layers: list[int], heads: int) -> dict:
    """fla's field `attn`, which makes these layers of a model softmax attention, as ours is."""
    heads = {"num_heads": heads, "num_kv_heads": heads}
    return {"layers": layers, **heads, "qkv_bias": False, "window_size": None, "rope_theta": 10000.0}


KINDS = {int: "a positive integer", float: "a positive number", Negative: "a negative number"}
KINDS |= {str: "text", bool: "True or False"}


def check_fields(settings) -> None:
    """Hold a dataclass against its annotations: a key of KINDS, a tuple of such kinds, or one of these `| None`.

    Numbers are finite and tuples are not empty. Fields of other kinds are not looked at.

    Raises:
        TypeError, ValueError: a field does not fit; the message names it.
    """
    for name, kind in get_type_hints(type(settings)).items():
        _check_value(name, kind, getattr(settings, name))


def _check_value(name: str, kind, x) -> None:
    first, *rest = get_args(kind) or (None,)
    if NoneType in rest:
        if x is not None:
            _check_value(name, first, x)
    elif get_origin(kind) is tuple:
        if not isinstance(x, tuple) or (rest != [...] and len(x) != len(rest) + 1):
            raise TypeError(f"{name}: expected {'a tuple' if rest == [...] else 'pairs'}, got {x!r}")
        if not x:
            raise ValueError(f"{name}: expected at least one element, got ()")
        for y in x:
            _check_value(name, first, y)
    elif kind in KINDS:
        number = kind in (float, Negative)
        if not isinstance(x, (int, float) if number else kind) or isinstance(x, bool) != (kind is bool):
            raise TypeError(f"{name}: expected {KINDS[kind]}, got {x!r}")
        if (number or kind is int) and not 0 < (-x if kind is Negative else x) < math.inf:
            raise ValueError(f"{name}: expected {KINDS[kind]}, got {x!r}")
