"""Settings that no paper uses, and settings that make no difference. The rows of a paper have all others."""

from __future__ import annotations

from dapo_rl.lab.papers.record import unused

UNUSED = (
    unused("Stop strings", "sampling.stop", "a response ends at the string, where the paper's goes on to its end"),
    unused("No end of sequence", "sampling.ignore_eos", "responses go on to the limit: for benchmarks only"),
    unused(
        "Skipped prompts",
        "sampling.skip_solved_epochs",
        "prompts that are solved are skipped, so the mix of prompts changes",
    ),
    unused(
        "Text of prompts",
        "data.system_prompt data.chat_template data.chat_template_kwargs",
        "the model reads other prompts than the data set's, to which only the chat template is applied",
    ),
    unused("Form of answers", "reward.form", "an answer that is equal but written in another form is wrong"),
    unused("Boxed answers", "reward.boxed", r"responses without an Answer line are right if their last \boxed{} is"),
    unused("Engine's options", "engine_options", "they can change what is sampled, as quantized weights do"),
    unused(
        "LoRA",
        "model.lora model.lora.rank model.lora.alpha model.lora.targets model.lora.save "
        "model.lora.dropout model.lora.use_rslora model.lora.use_dora",
        "the paper trains all weights; adapters usually need a learning rate that is ten times as high",
    ),
)
"""A row each, if a recipe changes one of the settings."""

IRRELEVANT = {
    "its settings are compared one by one": "preset",
    "another seed is another run of the same experiment": "seed",
    "engines sample from the same distribution, up to rounding": "engine",
    "where and how fast the run computes; the batch and its gradient are the same, up to rounding": """
        model.device sampling.max_batch sampling.kv_memory_gib train.token_budget train.packed
        train.gradient_checkpointing train.memory train.fused cluster.backend cluster.address cluster.engines
        cluster.engine_gpus cluster.ranks cluster.weights cluster.offload""",
    "how failures are handled": "reward.max_error_share cluster.restarts cluster.timeout_s",
    "how verdicts are computed, not what they are": """
        reward.timeout_s reward.memory_mb reward.workers sampling.wait_for_verdicts""",
    "where the rows of a file have the prompt and the ground truth": "data.prompt_key data.answer_key",
    "what is written, and when": """
        model.save_dtype eval.every checkpoint.every checkpoint.save_final checkpoint.keep log.rollouts
        log.keep_rollouts log.report log.trackers""",
}
"""Settings that make no difference to a comparison, by the reason."""
