"""scripts/generate.py from end to end: text to standard output, all else to standard error."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, script_as_typed

PROMPT = "The statement’s targets"  # the text that the model learned from holds this apostrophe


@pytest.fixture
def generate(forked, tiny_run, tmp_path):
    """generate(*arguments): the texts that the small model writes."""

    def run(*arguments, stdin=b""):
        common = [f"checkpoint={tiny_run[0]}", "threads=1", "device=cpu", "seed=1", "max_new_tokens=30"]
        result = forked("generate", *common, *arguments, cwd=tmp_path, stdin=stdin)
        assert result.status == 0, result.err
        assert len(result.err.splitlines()) == 1  # the closing line
        assert list(tmp_path.iterdir()) == []
        return result.out

    return run


def test_text_goes_to_standard_output_and_all_else_to_standard_error(tiny_run, tmp_path):
    """As typed after a first training: the newest run, no other arguments than a prompt."""
    run, _ = tiny_run
    result = script_as_typed("generate", f"prompt={PROMPT}", "max_new_tokens=30", cwd=run.parent)
    assert result.status == 0
    assert result.out.startswith(PROMPT)
    assert len(result.out) == len(PROMPT) + 30 + 1
    assert len(result.err.splitlines()) == 1
    assert str(run) in result.err


def test_one_seed_is_one_text_however_it_is_made(generate, tmp_path_factory):
    text = generate(f"prompt={PROMPT}")
    assert text.startswith(PROMPT)
    assert generate(f"prompt={PROMPT}", "cache=false") == text
    file = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    assert generate(f"prompt_file={file}") == text
    assert generate("prompt=-", stdin=PROMPT.encode()) == text
    assert generate(f"prompt={PROMPT}", "seed=2") != text


def test_bfloat16_is_a_key(generate):
    assert len(generate("prompt=The ", "precision=bf16")) == len(generate("prompt=The "))


@pytest.mark.slow
def test_a_missing_compiler_is_said_once_and_the_text_is_the_same(tiny_run, tmp_path):
    words = (f"checkpoint={tiny_run[0]}", "device=cpu", "max_new_tokens=30", "temperature=0", "prompt=The ")
    none = {"CXX": "/nowhere/g++", "PATH": "/nowhere"}
    uncompiled = script_as_typed("generate", *words, "compile=true", cwd=tmp_path, **none)
    assert uncompiled.out == script_as_typed("generate", *words, cwd=tmp_path).out
    assert uncompiled.err.count("compile=true: no compiler works, going on without it") == 1


def test_several_prompts_and_samples(generate):
    texts = generate('prompt=["The ","An assignment"]', "samples=2").removesuffix("\n").split("\n---\n")
    assert len(texts) == 4
    assert [
        text.startswith(start) for text, start in zip(texts, ["The "] * 2 + ["An "] * 2, strict=True)
    ] == [True] * 4
    assert len({*texts}) == 4


def test_a_terminal_without_unicode_gets_escapes(tiny_run, tmp_path):
    result = script_as_typed(
        *("generate", f"checkpoint={tiny_run[0]}", "prompt=-", "max_new_tokens=200", "seed=1"),
        cwd=tmp_path,
        stdin=PROMPT.encode(),
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
        LC_ALL="C",
    )
    assert result.status == 0, result.err
    assert result.out.isascii()
    assert result.out.startswith("The statement\\u2019s targets")


def test_a_reader_that_has_had_enough_is_no_fault(tiny_run, tmp_path):
    script = [
        sys.executable,
        str(ROOT / "scripts" / "generate.py"),
        f"checkpoint={tiny_run[0]}",
        "max_new_tokens=20000",
    ]
    with subprocess.Popen(
        script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
    assert process.returncode == 0
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
