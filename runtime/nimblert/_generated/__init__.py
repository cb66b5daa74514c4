"""What `flatc --python --gen-onefile` makes of schema/plan.fbs, unedited."""
