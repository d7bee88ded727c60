"""Has W&B's client an API key in this environment? As a program it prints what is wrong, or nothing.

A program, because the environment is that of the jobs, which may name server and key, and the client reads it once.
"""

import sys

import pydantic


def what_is_wrong() -> str:
    """In words; empty where the client finds a key. Nothing is sent: whether the server takes it is not asked."""
    from wandb.errors import Error
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    try:
        # What wandb.login and wandb.init do. (login itself heeds WANDB_MODE, and always asks the server.)
        server = wandb_setup.singleton().settings.base_url
        found = wbauth.authenticate_session(host=server, source="", prompt=False, update_session=False)
    except pydantic.ValidationError as error:
        # Without the value, which may be the key.
        return "; ".join(f"W&B's setting {one['loc'][0]}: {one['msg']}" for one in error.errors())
    except Error as error:
        return str(error)
    return "" if found else f"there is no W&B API key for {server}"


if __name__ == "__main__":
    sys.stdout.write(what_is_wrong())
