"""Text: everything between the words of a request and the token ids that the engine works on.

Owns the tokenizer, the chat template, the rule by which a turn is appended to a session, the incremental
detokeniser and stop strings. Depends on `tokenizers` and `jinja2` and on nothing else of ours: it knows neither gRPC
messages nor sessions nor the core. The service calls it; the engine never does.
"""

from colibri.daemon.chat.detokenizer import Detokenizer
from colibri.daemon.chat.errors import TemplateError, TextError, TokenizerError
from colibri.daemon.chat.model import TextModel
from colibri.daemon.chat.output import OutputText, Piece
from colibri.daemon.chat.stops import StopMatcher
from colibri.daemon.chat.template import ChatTemplate

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "OutputText",
    "Piece",
    "StopMatcher",
    "TemplateError",
    "TextError",
    "TextModel",
    "TokenizerError",
]
