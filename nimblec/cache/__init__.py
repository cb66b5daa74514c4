"""What is kept between compilations: plans of model files, and measured times."""
