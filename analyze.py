"""Hold a pretrained model against the bounds of the paper: its five experiments, an audit, one report.

$ python analyze.py                                            # gpt2-mini, all experiments, about a minute on two cores
$ python analyze.py analysis=separability normalizer=sparsemax # any key of conf/analyze.yaml can be set like this
$ python analyze.py ckpt_path=outputs/.../checkpoints/best.ckpt
"""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from attnlimits import cli, config

config.register()


def run(cfg: DictConfig, directory: Path) -> Any:
    from attnlimits.analysis.run import run as analysis  # torch takes seconds to import: not for --help

    analysis(cfg, directory, overrides=cli.overrides())


@hydra.main(version_base="1.3", config_path=str(config.PROJECT / "conf"), config_name="analyze")
def main(cfg: DictConfig) -> Any:
    return cli.job(run, cfg)


if __name__ == "__main__":
    cli.launch(main, config.AnalyzeConfig)
