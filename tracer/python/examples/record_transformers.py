"""From a model to a table, cell by cell. Runs as a script, or as a notebook where `# %%` is known.

    python3 record_transformers.py MODEL_DIR [KVREPLAY]
"""

# %% A model, wherever transformers can put it
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import kvtrace

directory = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2"
kvreplay = sys.argv[2] if len(sys.argv) > 2 else "kvreplay"
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{directory}/tokenizer.json")

# %% Record a generation: two lines around the call that is there anyway
text = "Key/value caches grow with every token. " * 20
inputs = tokenizer(text, return_tensors="pt").to(device)
torch.manual_seed(0)
with kvtrace.record(model, "run.h5", extras=["wo", "residual"], tokenizer=tokenizer, seed=0):
    model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=64,
        do_sample=True,
        temperature=0.8,
    )

# %% The replayer judges the trace, then the policies
subprocess.run([kvreplay, "inspect", "run.h5", "--check"], check=True)
policies = ["full", "window:budget=96", "streaming:budget=96", "h2o:budget=96", "tova:budget=96"]
chosen = [argument for policy in policies for argument in ("-p", policy)]
subprocess.run([kvreplay, "replay", "run.h5", *chosen], check=True)

# %% Given tokens instead of generated ones: one causal pass in blocks, at the speed of a prompt
ids = tokenizer(text).input_ids
kvtrace.teacher_forced(model, ids, "given.h5", prompt_length=len(ids) // 2, tokenizer=tokenizer)

# %% Several prompts at once: padded on the left, one sequence of the trace for each
tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.decode([0])
batch = tokenizer(["One prompt.", "Another, longer prompt."], return_tensors="pt", padding=True)
batch = batch.to(device)
spans = [{"needle": [(0, 2)]}, {"needle": [(2, 4)]}]  # positions without the padding
with kvtrace.record(model, "batch.h5", spans=spans, tokenizer=tokenizer):
    model.generate(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
subprocess.run([kvreplay, "inspect", "batch.h5", "--check"], check=True)
