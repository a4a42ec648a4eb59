// gRPC by Node's own HTTP/2, or by @grpc/grpc-js. Arguments: "http2" or "grpc-js", address. Lines of standard input: path
// and message in base64, tab-separated; of standard output: status of gRPC, and message in base64.
import http2 from "node:http2";
import readline from "node:readline";

const [library, address] = process.argv.slice(2);

function byHttp2(session, path, message) {
  return new Promise((resolve, reject) => {
    const stream = session.request({ ":method": "POST", ":path": path, "content-type": "application/grpc", te: "trailers" });
    const frame = Buffer.alloc(5);
    frame.writeUInt32BE(message.length, 1);
    const parts = [];
    let status;
    stream.on("response", (headers) => { status = headers["grpc-status"] ?? status; });
    stream.on("trailers", (headers) => { status = headers["grpc-status"] ?? status; });
    stream.on("data", (part) => parts.push(part));
    stream.on("end", () => resolve([status, Buffer.concat(parts).subarray(5)]));
    stream.on("error", reject);
    stream.end(Buffer.concat([frame, message]));
  });
}

function byGrpc(client, path, message) {
  const bytes = (value) => value;
  return new Promise((resolve) => {
    client.makeUnaryRequest(path, bytes, bytes, message, (error, answer) =>
      resolve(error ? [error.code, Buffer.alloc(0)] : [0, answer]));
  });
}

let ask;
if (library === "http2") {
  const session = http2.connect(`http://${address}`);
  ask = (path, message) => byHttp2(session, path, message);
} else {
  const { default: grpc } = await import("@grpc/grpc-js");
  const client = new grpc.Client(address, grpc.credentials.createInsecure());
  ask = (path, message) => byGrpc(client, path, message);
}
for await (const line of readline.createInterface({ input: process.stdin })) {
  const [path, data] = line.split("\t");
  const [status, message] = await ask(path, Buffer.from(data, "base64"));
  console.log([status, message.toString("base64")].join("\t"));
}
process.exit(0);
