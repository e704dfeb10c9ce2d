"""What the deepspeed launcher starts, and the ``megakv`` command."""
