"""The files in the directories of pipelines other than their weights."""

from __future__ import annotations

from ckptconv.features.companions.directory import Row

ROWS = (
    Row("model_index.json", "diffusers", "list of components"),
    Row("scheduler_config.json", "diffusers", "configuration"),
    Row("modules.json", "sentence-transformers", "list of modules"),
    Row(
        "config_sentence_transformers.json router_config.json sentence_bert_config.json sentence_roberta_config.json "
        "sentence_distilbert_config.json sentence_camembert_config.json sentence_albert_config.json "
        "sentence_xlm-roberta_config.json sentence_xlnet_config.json lstm_config.json cnn_config.json "
        "wordembedding_config.json",
        "sentence-transformers",
        "configuration",
    ),
    Row("whitespacetokenizer_config.json phrasetokenizer_config.json", "sentence-transformers", "tokenizer"),
)
