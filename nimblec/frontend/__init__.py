"""The front ends: a model as a user gives it, as something that can be run and captured."""
