"""The rules of a valid plan, checked without a device."""
