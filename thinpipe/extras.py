"""Extras of the package: which of them brings a module that is not installed."""

from __future__ import annotations

# Extra of pyproject.toml -> modules that it brings and that the library itself does without.
EXTRAS = {
    "train": ("typer", "rich", "transformers", "peft", "sklearn", "tensorboard", "yaml", "cryptography"),
    "nf4": ("bitsandbytes",),
    "all": ("datasets", "matplotlib", "scipy"),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return a sentence about what to install; None for modules that no extra brings."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"this needs {module}, which is not installed: pip install 'thinpipe[{extra}]'"
    return None
