"""Small real reward models."""

from copy import deepcopy

from support import small_model, tokenizer
from transformers import LlamaForSequenceClassification

from dapo_rl.models.save import save_model


def classifier(labels=1, **changes):
    """The small random Llama with a random classification head."""
    config = small_model(**changes).config
    config.num_labels = labels
    return LlamaForSequenceClassification(config).eval()


def words_with(template=None):
    """The tokenizer with another chat template. Other tests use the one of `support` with its own."""
    words = deepcopy(tokenizer())
    words.chat_template = template
    return words


def save_classifier(path, labels=1, template=None, **changes):
    """Saves one with its tokenizer; returns the model."""
    model, words = classifier(labels, **changes), words_with(template)
    model.save_pretrained(path)
    words.save_pretrained(path)
    return model


def save_language_model(path):
    save_model(small_model(), tokenizer(), path)
