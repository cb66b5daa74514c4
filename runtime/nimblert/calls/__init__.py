"""What a call is given and what it gives, whatever the target."""
