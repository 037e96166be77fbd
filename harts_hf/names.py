"""Names of models: whether a folder, the local cache or the hub has one, found out in seconds.

Transformers asks a hub that does not answer again and again before it says that there is no such model.
"""

from pathlib import Path

# One question, no second one: whoever has a slow line has a hub that answers within it.
SECONDS_FOR_HUB = 5.0
# A file that whatever is loaded by a name has: a model, a tokenizer.
_MODEL_FILES = ("config.json",)
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def is_cached(name: str, files: tuple[str, ...] = _MODEL_FILES, *, revision: str | None = None) -> bool:
    """Whether the local Hugging Face cache has one of these files of a name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    except HFValidationError:
        return False


def check_model_name(option: str, name: str, *, revision: str | None = None) -> None:
    """Checks that there is something to load a model from: a folder or file, the cache, or (asked once) the hub.

    Args:
        option: what named it, for the message.
        name: as ``from_pretrained`` takes it, or a configuration's file.
        revision: of a name on the hub.

    Raises:
        ValueError: there is not; the message says where it was looked for, and what would help.
    """
    if Path(name).exists() or is_cached(name, revision=revision):
        return
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    expected = f"expected {option} to be a model's folder or name, got {name!r}: no such folder"
    nothing = f"{expected}, nothing of that name in the cache ({constants.HF_HUB_CACHE})"
    fetch = f"fetch it where there is a network (`hf download {name}`), or give the path of its folder"
    if constants.is_offline_mode():
        raise ValueError(f"{nothing}, and HF_HUB_OFFLINE forbids to ask the hub: {fetch}")
    try:
        get_hf_file_metadata(hf_hub_url(name, _MODEL_FILES[0], revision=revision), timeout=SECONDS_FOR_HUB)
    except HFValidationError as error:  # of a path, mostly
        raise ValueError(f"{expected}, and no name that a hub could have") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{nothing}, and the hub gives it to those only who have accepted its terms: do so on "
            f"{constants.ENDPOINT}/{name}, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{nothing}, and the hub shows none (a private one needs `hf auth login`)") from error
    except HfHubHTTPError as error:
        raise ValueError(f"{nothing}, and the hub says: {str(error).splitlines()[0]}") from error
    except Exception as error:  # of the client's library, which has its own for each kind of silence
        raise ValueError(f"{nothing}, and the hub ({constants.ENDPOINT}) does not answer: {fetch}") from error
