"""`python -m paceline_reward SETTINGS.yaml`."""

from paceline.platform.program import importing, leave

with importing():
    from paceline.platform.server.chassis import main
    from paceline_reward.service import build

if __name__ == "__main__":
    leave(main(build))
