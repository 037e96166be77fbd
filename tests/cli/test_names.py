"""Names of models that are nowhere: found out by one question, and said with what helps."""

from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from harts_hf import names
from harts_hf.cli.loading import tokenizer_name
from harts_hf.names import check_model_name

ANSWER = httpx2.Response(404, request=httpx2.Request("HEAD", "https://hub.example/config.json"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An online machine with an empty cache; answers with `hub.error`, and keeps the questions."""
    found = SimpleNamespace(error=None, asked=[])

    def answer(url, **options):
        found.asked.append((url, options))
        if found.error is not None:
            raise found.error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", answer)
    return found


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx2.ConnectError("no such host"), r"the hub \(https://.*\) does not answer: fetch it .*`hf download a/b`"),
        (RepositoryNotFoundError("404", response=ANSWER), r"the hub shows none \(a private one needs `hf auth login`"),
        (
            GatedRepoError("403", response=ANSWER),
            "who have accepted its terms: do so on https://.*/a/b, then `hf auth",
        ),
    ],
    ids=["silent", "unknown", "gated"],
)
def test_the_hub_is_asked_once(hub, error, message):
    """With a time limit; the message says that folder and cache were tried, too."""
    hub.error = error
    with pytest.raises(
        ValueError, match=r"got 'a/b': no such folder, nothing of that name in the cache \(.*hub\)"
    ) as e:
        check_model_name("--model", "a/b")
    assert e.match(message) and [options for _, options in hub.asked] == [{"timeout": names.SECONDS_FOR_HUB}]


def test_what_is_there_passes_without_a_question(hub, tmp_path, monkeypatch):
    """A folder; a name in the cache, of which `verify` takes the tokenizer too. A name on the hub by one."""
    check_model_name("--model", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--a--cached" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text("{}")
    check_model_name("--model", "a/cached")
    assert not hub.asked
    options = SimpleNamespace(tokenizer=None, model="a/cached")
    assert tokenizer_name(options) is None
    (snapshot / "tokenizer.json").write_text("{}")
    assert tokenizer_name(options) == "a/cached"
    check_model_name("--model", "a/b", revision="v2")
    assert hub.asked[0][0].endswith("/a/b/resolve/v2/config.json")
    with pytest.raises(ValueError, match="no such folder, and no name that a hub could have"):
        check_model_name("--model", "path/to/Qwen")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids to ask the hub"):
        check_model_name("--model", "a/b")


def test_a_machine_without_a_network_says_so_at_once(monkeypatch, tmp_path):
    """The hub's own client, in a cache of its own: seconds, not its five retries."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s to ask again"))
    with pytest.raises(ValueError, match="does not answer"):
        check_model_name("--model", "a/b")
