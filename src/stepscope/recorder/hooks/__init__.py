"""The hooks: one module per thing in torch that is hooked."""
