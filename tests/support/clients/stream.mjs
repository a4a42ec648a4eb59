// ModelStreamInfer by @grpc/grpc-js with stubs of @grpc/proto-loader (protobuf.js). Arguments: address, file with the
// FileDescriptorSet of KServe v2. Lines of standard input: a ModelInferRequest in base64, each for a stream of its own;
// of standard output: all that came back on that stream, as JSON.
import fs from "node:fs";
import readline from "node:readline";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, descriptors] = process.argv.slice(2);
const options = { keepCase: true, bytes: String, longs: Number, oneofs: true };
const loaded = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(descriptors), options);
const { GRPCInferenceService: Service } = grpc.loadPackageDefinition(loaded).inference;
const client = new Service(address, grpc.credentials.createInsecure());
const { requestDeserialize } = Service.service.ModelStreamInfer;

function ask(data) {
  return new Promise((resolve, reject) => {
    const answers = [];
    const call = client.ModelStreamInfer();
    call.on("data", (answer) => answers.push(answer));
    call.on("error", reject);
    call.on("end", () => resolve(answers));
    call.write(requestDeserialize(data));
    call.end();
  });
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await ask(Buffer.from(line, "base64"))));
}
process.exit(0);
