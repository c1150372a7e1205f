from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"

CHAT = (
    "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def shared_file():
    def find(name):
        path = SHARED / name
        if not path.is_file():
            pytest.skip(f"shared/data/{name} is not beside the repository")
        return path

    return find


@pytest.fixture(scope="session")
def make_tokenizer():
    """A tokenizer of single characters: 0 unknown, 1 `<s>`, 2 `</s>`, then ASCII. Plain text gets `<s>` before it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(chat_template=None, closes_with_eos=False):
        vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2}
        vocabulary |= {chr(code): len(vocabulary) + at for at, code in enumerate([10, *range(32, 127)])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>" if closes_with_eos else "<s> $A",
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="[UNK]",
            bos_token="<s>",
            eos_token="</s>",
            chat_template=chat_template,
        )

    return make


@pytest.fixture(scope="session")
def plain_tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer(make_tokenizer):
    return make_tokenizer(CHAT)
