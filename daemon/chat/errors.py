"""The errors of this package, in one place so that the service maps each kind to one gRPC code."""


class TextError(ValueError):
    """Text or token ids that cannot be converted; the message names the text or id and the limit."""


class TokenizerError(TextError):
    """The model's tokenizer files are missing, damaged, contradictory or of a kind that is not understood."""


class TemplateError(TextError):
    """A chat cannot be rendered: no template, a broken one, or one that refused (`raise_exception`) with its text."""
