"""How the embedded checkpoints were made: model, mixture, training loop, and plans emulated in torch to choose by."""
