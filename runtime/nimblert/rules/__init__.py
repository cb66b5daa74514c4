"""What a plan must keep to, checked without a device."""
