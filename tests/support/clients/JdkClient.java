import java.io.ByteArrayInputStream;
import java.io.InputStreamReader;
import java.io.BufferedReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.Base64;

/**
 * The JDK's HTTP client as it is: HTTP/2 by an upgrade offer. Arguments: address. Lines of standard input and output:
 * see http_clients.py.
 */
public class JdkClient {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            var fields = line.split("\t", -1);
            var body = Base64.getDecoder().decode(fields[4]);
            var request = HttpRequest.newBuilder(URI.create("http://" + arguments[0] + fields[1]));
            if (fields[0].equals("GET")) {
                request.GET();
            } else if (fields[2].equals("chunked")) {
                request.POST(BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body)));
            } else {
                request.POST(BodyPublishers.ofByteArray(body));
            }
            for (String header : fields[3].isEmpty() ? new String[0] : fields[3].split("\\|")) {
                request.header(header.split(": ")[0], header.split(": ")[1]);
            }
            var answer = client.send(request.build(), BodyHandlers.ofByteArray());
            var type = answer.headers().firstValue("content-type").orElse("");
            var length = answer.headers().firstValue("inference-header-content-length").orElse("");
            var data = Base64.getEncoder().encodeToString(answer.body());
            System.out.println(answer.statusCode() + "\t" + type + "\t" + length + "\t" + data);
        }
    }
}
