// TrainingStep: the loop around the files of onnxgrad's export_step(), for any onnxruntime of JavaScript.
//
//   const step = await TrainingStep.open(ort, "step.json", read);     // ort: onnxruntime-web or onnxruntime-node
//   const loss = await step.run({ x: [pixels, [32, 64]], target: [classes, [32]] });
//
// `read(name)` gives the bytes of a file, as an ArrayBuffer or a Uint8Array.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array, uint8: Uint8Array,
  int8: Int8Array, int16: Int16Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array, bool: Uint8Array,
};
const OF_SAFETENSORS = { F32: "float32", F64: "float64", I32: "int32", I64: "int64", U8: "uint8", BOOL: "bool" };

export class TrainingStep {
  /** Reads the description and all that it names; `options` are those of onnxruntime's sessions. */
  static async open(ort, description, read, options = {}) {
    const bytes = async (name) => new Uint8Array(await read(name));
    const step = new TrainingStep();
    step.ort = ort;
    step.described = JSON.parse(new TextDecoder().decode(await bytes(description)));
    const files = step.described.files;
    step.open = async (which) => {
      const apart = step.described.external_data?.[which] ?? [];
      const externalData = await Promise.all(apart.map(async (path) => ({ path, data: await bytes(path) })));
      const more = apart.length ? { externalData } : {};
      return ort.InferenceSession.create(await bytes(files[which]), { ...options, ...more });
    };
    step.read = bytes;
    step.state = readSafetensors(ort, await bytes(files.initial));
    step.session = await step.open("step");
    step.learningRate = step.described.learning_rate.default;
    return step;
  }

  /** One update. A batch has [numbers, shape] for each input. Returns the loss before the update. */
  async run(batch, learningRate = this.learningRate) {
    const { described, ort } = this;
    const rate = new ort.Tensor("float32", [learningRate], []);
    const feeds = { ...this.tensors(batch), ...this.state, [described.learning_rate.input]: rate };
    const found = await this.session.run(feeds);
    const loss = found[described.loss].data[0];
    if (!Number.isFinite(loss)) throw new Error(`the loss is ${loss}; the parameters are those before the step`);
    this.state = Object.fromEntries(described.state.map((entry) => [entry.input, found[entry.output]]));
    return loss;
  }

  /** The loss of a batch, and the model's outputs, in inference mode. */
  async evaluate(batch) {
    const { evaluation } = this.described;
    this.evaluation ??= await this.open("evaluation");
    const state = Object.fromEntries(evaluation.state.map((name) => [name, this.state[name]]));
    const found = await this.evaluation.run({ ...this.tensors(batch), ...state });
    return { loss: found[evaluation.loss].data[0], outputs: found };
  }

  /** The bytes of the model's files, by name, with the trained weights in them. */
  async model() {
    const names = [this.described.files.model, ...(this.described.external_data?.model ?? [])];
    const files = Object.fromEntries(await Promise.all(names.map(async (name) => [name, (await this.read(name)).slice()])));
    for (const { input, in_model: place } of this.described.state) {
      if (!place) continue;
      const { buffer, byteOffset, byteLength } = this.state[input].data;
      files[place.file].set(new Uint8Array(buffer, byteOffset, byteLength), place.offset);
    }
    return files;
  }

  tensors(batch) {
    const given = this.described.batch.filter(({ input }) => input in batch);
    return Object.fromEntries(given.map(({ input, type }) => {
      const [numbers, shape] = batch[input];
      const array = ARRAYS[type];
      const whole = type === "int64" || type === "uint64";
      const data = numbers instanceof array ? numbers : array.from(numbers, whole ? BigInt : Number);
      return [input, new this.ort.Tensor(type, data, shape)];
    }));
  }
}

/** The tensors of a safetensors file: the length of a header, the header as JSON, and the numbers. */
function readSafetensors(ort, bytes) {
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const found = {};
  delete header.__metadata__;
  for (const [name, { dtype, shape, data_offsets: [start, end] }] of Object.entries(header)) {
    const type = OF_SAFETENSORS[dtype];
    if (!type) throw new Error(`${name} holds ${dtype}, expected one of ${Object.keys(OF_SAFETENSORS).join(", ")}`);
    const numbers = bytes.slice(8 + length + start, 8 + length + end).buffer; // a copy, which is aligned
    found[name] = new ort.Tensor(type, new ARRAYS[type](numbers), shape);
  }
  return found;
}
