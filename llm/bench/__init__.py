"""How fast training is: real steps of any configuration, and of the models that people use today."""
