"""Loss and gradients."""
