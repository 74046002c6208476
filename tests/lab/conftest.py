import pytest
from conftest import TEXT

from lab.fakes import SMALL, ablate_command, composing
from minilm import launch
from minilm.lab.study import Study, plan
from minilm.words import key_of


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """planned(*words, small=True): the study of these words, over a small text unless it is said otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "ROOT", tmp_path / "root")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    own = {"vary", "seeds", "study", "out_dir"}

    def make(*words: str, small: bool = True) -> Study:
        mine = [word for word in words if key_of(word).partition(".")[0] in own]
        others = [word for word in words if word not in mine]
        with composing():
            return plan(ablate_command(mine, [*SMALL, "data.path=text.txt", *others] if small else others))

    return make
