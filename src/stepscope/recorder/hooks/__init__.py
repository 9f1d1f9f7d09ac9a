"""The hooks: one module for each part of torch that is hooked."""
