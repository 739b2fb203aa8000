"""Plain text for language models, cut into chunks of tokens."""

from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.text import from_chunks

WHAT = "plain text"
SUFFIXES = (".txt",)
TAKES = ("tokenizer", "length")


def read(request: Request) -> Source:
    """The chunks of a text."""
    if request.settings.tokenizer is None or request.fields is None:
        raise request.error(
            f"is text, which needs a model and its tokenizer.json, which {request.option('tokenizer')} names"
        )
    try:
        return from_chunks(request)
    except UnicodeDecodeError as error:
        raise request.error(f"is not text in UTF-8 ({error.reason} at byte {error.start})") from None
