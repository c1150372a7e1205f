"""What becomes of each field of TRL's `GRPOConfig`, as docs/from-trl.md says it."""

import dataclasses

from dapo_rl.config.peers import LIBRARIES


def decisions(kind):
    """For each field of `GRPOConfig`: what becomes of a value that is not the default, and a remark."""
    result = {}
    for field in dataclasses.fields(kind):
        entry = LIBRARIES["trl"].find(field.name)
        inner = [name for name in LIBRARIES["trl"].settings if name.startswith(f"{field.name}.")]
        if field.name in _SPECIAL:
            result[field.name] = _SPECIAL[field.name]
        elif entry is None:
            result[field.name] = ("unknown", "")
        elif entry.ours is not None:
            result[field.name] = (f"`{entry.ours}`", entry.note)
        elif entry.learns and not entry.is_off(field.default):
            result[field.name] = ("differs", entry.note)
        elif entry.learns:
            kept = f", except {', '.join(f'`{name}`' for name in inner)}" if inner else ""
            result[field.name] = ("refused", entry.note + kept)
        elif entry.off:
            result[field.name] = ("always so", entry.note)
        else:
            result[field.name] = ("ignored", entry.note)
    return result


_SPECIAL = {
    "output_dir": ("`run_dir`", "the run directory; the model is in its folder model/"),
    "resume_from_checkpoint": ("ignored", "in TRL as well; pass it to `train(resume_from_checkpoint=…)`"),
    "reward_weights": ("weights of `reward_funcs`", ""),
    "save_strategy": ("`checkpoint.every`", "the last step writes a checkpoint too"),
    "bf16": ("`model.dtype`", "true: bfloat16 where the hardware has it; false: float32"),
    "model_init_kwargs": (
        "`model.dtype`",
        "its `dtype`, with `bf16=False`; another `revision`, remote code and quantisation are refused, others ignored",
    ),
    "push_to_hub": ("`push_to_hub()`", "called after the last step"),
    "hub_model_id": ("`push_to_hub()`", ""),
    "hub_token": ("`push_to_hub()`", ""),
    "hub_private_repo": ("`push_to_hub()`", ""),
    "hub_revision": ("`push_to_hub()`", ""),
    "hub_strategy": ("ignored", "the model is uploaded once, after the last step"),
    "hub_always_push": ("ignored", "the model is uploaded once, after the last step"),
    "fp16": ("refused", "float16 is not supported; `model.dtype` is bfloat16 or float32"),
    "run_name": ("ignored", "trackers take the name of the run directory"),
    "project": ("ignored", "trackers take the name of the run directory"),
    "epsilon_high": ("`algo.clip_high`", "not set: 0.28 (Clip-Higher) with the default epsilon, otherwise epsilon"),
}
