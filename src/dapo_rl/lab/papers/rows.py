"""The rows of DAPO's and of VAPO's paper, settings that no paper uses, and settings that make no difference.

Where DAPO's paper is silent, values are those of the authors' published script for verl. VAPO's paper repeats DAPO's
run with a critic; what it does not state is as in DAPO.
"""

from __future__ import annotations

from dapo_rl.lab.papers import algorithm, settings
from dapo_rl.lab.papers.compare import Paper, unused

UNUSED = (
    unused("Stop strings", "sampling.stop", "a response ends at the string, where the paper's goes on to its end"),
    unused("No end of sequence", "sampling.ignore_eos", "responses go on to the limit: for benchmarks only"),
    unused("Retired prompts", "sampling.retire", "prompts that are solved are skipped, so the mix of prompts changes"),
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
        model.save_dtype eval.every checkpoint.every checkpoint.last checkpoint.keep log.rollouts log.keep_rollouts
        log.report log.to""",
}
"""Settings that make no difference to a comparison, by the reason."""

DAPO = Paper(
    "DAPO",
    "2503.14476",
    50,
    (
        *(algorithm.objective, algorithm.no_lm_loss, algorithm.ratio, algorithm.advantage, algorithm.clip_higher),
        *(settings.dynamic_sampling, settings.batch_filling, algorithm.token_level, settings.soft_punishment),
        *(settings.overlong_filtering, algorithm.kl_term, algorithm.clip_bounds, settings.punishment_interval),
        *(settings.reward, settings.prompts_per_step, settings.group_size, settings.updates_per_step),
        *(settings.length_of_the_run, settings.learning_rate, settings.warmup, settings.optimizer, settings.precision),
        *(settings.prompt_tokens, settings.new_tokens, settings.temperature, settings.truncated_sampling),
        *(settings.cap_on_draws, settings.surplus_groups, settings.model, settings.training_prompts),
        *(settings.heldout_prompts, settings.heldout_samples, settings.heldout_sampling, *UNUSED),
    ),
    without_effect=(
        *("critic.lr", "critic.pretrain_steps", "critic.lambda_policy", "critic.lambda_critic"),
        *("critic.length_alpha", "critic.lambda_lowest", "critic.value_clip", "critic.whiten"),
    ),
)

_SETUP, _INHERITED = "Sec. 5.1", "as in DAPO"
VAPO = Paper(
    "VAPO",
    "2504.05118",
    60.4,
    (
        *(algorithm.critic, algorithm.pretraining, algorithm.decoupled_gae, algorithm.adaptive_gae),
        *(algorithm.objective.at("Eq. 8"), algorithm.ratio.at("Eq. 8"), algorithm.clip_higher.at("Eq. 8", without=46)),
        algorithm.token_level.at("Eq. 7", find=algorithm.token_mean, without=53),
        *(algorithm.lm_loss, settings.group_sampling, settings.no_filter, algorithm.kl_term.at("Eq. 10")),
        *(algorithm.pretrain_steps, algorithm.length_alpha, algorithm.value_clip, algorithm.whitening),
        *(algorithm.clip_bounds.at(_SETUP), algorithm.lm_loss_weight),
        settings.soft_punishment.at(_INHERITED, kind="settings"),
        settings.punishment_interval.at(_INHERITED),
        settings.overlong_filtering.at(_INHERITED, paper="off"),
        *(settings.reward.at(_INHERITED), settings.prompts_per_step.at(_SETUP)),
        settings.group_size.at(_SETUP, find=settings.contrast),
        settings.updates_per_step.at(_SETUP),
        settings.length_of_the_run.at("Fig. 1", paper="5,000 updates", find=settings.total_updates(5_000)),
        *(settings.learning_rate.at(_SETUP), algorithm.critic_rate),
        settings.warmup.at(_SETUP, paper="length not stated", find=settings.warmup_steps(None)),
        *(settings.optimizer.at(_INHERITED), settings.precision.at(_INHERITED), settings.prompt_tokens.at(_INHERITED)),
        *(settings.new_tokens.at(_INHERITED), settings.temperature.at(_INHERITED)),
        *(settings.truncated_sampling.at(_INHERITED), settings.surplus_groups.at(_INHERITED)),
        *(settings.model.at(_SETUP), settings.training_prompts.at(_INHERITED), settings.heldout_prompts.at(_SETUP)),
        *(settings.heldout_samples.at(_SETUP), settings.heldout_sampling.at(_SETUP), *UNUSED),
    ),
)
