"""`diptych profile`: what a model costs here, operator by operator."""
