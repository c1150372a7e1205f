"""Tokenizers of model families: their chat templates and special tokens over a small byte-level BPE."""

from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dapo_rl.models.tokenizer import build_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}{{ '<|im_start|>' + message.role + '\n' + "
    "message.content }}{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + "
    "'</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Rejects the result of a tool that was not called, as Mistral's template does."""
SKIPPING = STRICT.replace("{{ raise_exception('a result without a call') }}{% endif %}", "{% else %}").replace(
    "{% endfor %}{% if add", "{% endif %}{% endfor %}{% if add"
)
"""Leaves it out without a word, as Gemma's does."""
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALLS = ["<tool_call>", "</tool_call>"]
THOUGHTS = [*CALLS, "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The split of Llama 3 and Qwen."""
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ċ", "Ċ"), ("l", "l"), ("a", "b"), ('"', "}"), ("s", "t")]


def bpe(template, special, added=(), eos=None, bos=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet + ["".join(pair) for pair in MERGES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    return fast


@cache
def tokenizer_of(family):
    read = {
        "qwen2.5": lambda: bpe(shipped("qwen2_5"), CHATML, CALLS, "<|im_end|>"),
        "qwen3": lambda: bpe(shipped("qwen3"), CHATML, THOUGHTS, "<|im_end|>"),
        "qwen3-instruct": lambda: bpe(shipped("qwen3_instruct_2507"), CHATML, THOUGHTS, "<|im_end|>"),
        "llama-3": lambda: bpe(shipped("llama3"), LLAMA, (), "<|eot_id|>", "<|begin_of_text|>"),
        "llama-3.2": lambda: bpe(shipped("llama3_2"), LLAMA, (), "<|eot_id|>", "<|begin_of_text|>"),
        "smollm2": lambda: bpe(SMOLLM2, CHATML, (), "<|im_end|>"),
        "r1": lambda: bpe(
            shipped("deepseek_r1_distill"),
            ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
            ["<think>", "</think>"],
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
        ),
        "strict": lambda: bpe(STRICT, CHATML, CALLS, "<|im_end|>"),
        "skipping": lambda: bpe(SKIPPING, CHATML, CALLS, "<|im_end|>"),
        "tiny": build_tokenizer,
        "plain": without_template,
    }
    return read[family]()


def shipped(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def without_template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    return tokenizer
