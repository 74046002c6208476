def write(study, results):
    (study.folder / "summary.txt").write_text(
        "\n".join(
            f"{r.job.variant.name} {r.job.seed} {r.state} {r.loss} {r.reason} {r.longer}" for r in results
        )
    )
    return []
