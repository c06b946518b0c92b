"""What tests of the trunk ask of the adapters of Megatron-Bridge too: nothing."""
