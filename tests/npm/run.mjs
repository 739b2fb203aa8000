// Runs the batches of run.json by a step's files, and prints the losses, an evaluation and the model's output as JSON.
// node run.mjs RUNTIME FOLDER, where RUNTIME is onnxruntime-node or onnxruntime-web

import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { TrainingStep } from "../../examples/web/training-step.mjs";

const [, , runtime, folder] = process.argv;
const require = createRequire(join(process.cwd(), "node_modules", "package.json"));
const found = await import(pathToFileURL(require.resolve(runtime)));
const ort = found.default ?? found;
const step = await TrainingStep.open(ort, "step.json", (name) => readFile(join(folder, name)));
const { batches } = JSON.parse(await readFile(join(folder, "run.json")));
const losses = [];
for (const batch of batches) losses.push(await step.run(batch));
for (const [name, bytes] of Object.entries(await step.model())) await writeFile(join(folder, `trained-${name}`), bytes);
const { loss } = await step.evaluate(batches[0]);
console.log(JSON.stringify({ losses, loss }));
