"""Small real reward models."""

from support import small_model, tokenizer
from transformers import LlamaForSequenceClassification

from dapo_rl.models.save import save_model


def classifier(labels=1, **changes):
    """The small random Llama with a random classification head."""
    config = small_model(**changes).config
    config.num_labels = labels
    return LlamaForSequenceClassification(config).eval()


def save_classifier(path, labels=1, template=None, **changes):
    """Saves one with its tokenizer; returns the model."""
    model, words = classifier(labels, **changes), tokenizer()
    model.save_pretrained(path)
    words.chat_template = template
    words.save_pretrained(path)
    words.chat_template = None
    return model


def save_language_model(path):
    save_model(small_model(), tokenizer(), path)
