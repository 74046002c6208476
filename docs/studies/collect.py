"""Copy finished studies here and write the index: python docs/studies/collect.py runs/studies/NAME …

Each study gets a folder with its report, figures and numbers. What a person has to say of it is in words.md there,
which is kept; the index shows it below the tables.
"""

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Studies

What the textbooks say, beside what minilm measured. `report.html` in each folder is the whole page, with the command
and configuration of every run; `python scripts/ablate.py study=NAME` makes it again. Most of these runs shared their
machine with other work, so what they say of time is of no use; losses do not depend on it.
"""


def collect(study: Path) -> None:
    """Copy a study's report."""
    target = HERE / study.name
    target.mkdir(exist_ok=True)
    for pattern in ("report.*", "*.svg", "*.csv", "study.yaml"):
        for path in study.glob(pattern):
            shutil.copy(path, target / path.name)


def entry(folder: Path) -> str:
    """A study in the index: its question, theory, tables and first figures, and words.md."""
    report = (folder / "report.md").read_text(encoding="utf-8")
    title, _, rest = report.partition("\n")
    answer = rest.partition("## Figures")[0].replace("\n## ", "\n### ").strip()
    longer = re.search(r"## (Longer contexts.*?)(?=\n## )", rest, re.DOTALL)
    figures = [
        name for name in ("differences", "curves", "score_std", "longer") if (folder / f"{name}.svg").exists()
    ]
    words = folder / "words.md"
    parts = [
        f"#{title} ([{folder.name}]({folder.name}/report.md))",
        answer,
        f"### {longer[1].strip()}" if longer else "",
        "\n".join(f"![{name}]({folder.name}/{name}.svg)" for name in figures),
        words.read_text(encoding="utf-8").strip() if words.exists() else "",
    ]
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    for name in sys.argv[1:]:
        if not (Path(name) / "report.md").exists():
            sys.exit(f"collect: {name} holds no report.md: name the folders of finished studies")
        collect(Path(name))
    studies = sorted(path.parent for path in HERE.glob("*/report.md"))
    index = "\n\n".join([HEAD.strip(), *map(entry, studies)]) + "\n"
    (HERE / "README.md").write_text(index, encoding="utf-8")


if __name__ == "__main__":
    main()
