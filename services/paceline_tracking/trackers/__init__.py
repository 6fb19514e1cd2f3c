"""Experiment trackers; each imports its library when it is made."""

from paceline.plugins import Plugin, Plugins

PLUGINS = Plugins(
    {
        "trackers": {
            "tensorboard": Plugin(".tensorboard:tensorboard"),
            "wandb": Plugin(".wandb:wandb"),
            "mlflow": Plugin(".mlflow:mlflow"),
            "trackio": Plugin(".trackio:trackio"),
        },
    }
)
