"""What tests of the trunk ask of the configurations of Megatron-Bridge too: nothing."""
