"""What a shell offers at TAB. Loads neither Hydra nor the components: a TAB must not wait."""
