"""Fine-tune a pretrained GPT-2 with another attention normalizer.

$ python train.py                                   # softmax, T=1, gpt2-mini, about two minutes on two cores
$ python train.py normalizer=sparsemax T=0.05       # any key of conf/train.yaml can be set like this
$ python train.py ckpt_path=outputs/.../checkpoints/last.ckpt      # go on where a run stopped
"""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from attnlimits import cli, config, sweep

config.register()


def run(cfg: DictConfig, directory: Path) -> Any:
    from attnlimits.training import train  # torch and Lightning take seconds to import: not for --help

    overrides = [] if sweep.is_job() else cli.overrides()  # a job goes on as it began
    return train(cfg, directory, overrides=overrides).summary["val/loss"]


@hydra.main(version_base="1.3", config_path=str(config.PROJECT / "conf"), config_name="train")
def main(cfg: DictConfig) -> Any:
    return sweep.run_job(run, cfg) if sweep.is_job() else cli.job(run, cfg)


if __name__ == "__main__":
    cli.launch(main, config.TrainConfig)
